"""Prompts from files: what a row is, which split it is in, how it is found again, and what is said of a bad one."""

import json
import re
import threading

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from schemas.errors import UserError
from schemas.recipe import DataSection, TaskSection
from stages.prompts import files
from stages.prompts.datasets import open_prompts

TASK = TaskSection(environment="question", reward="exact")
ROWS = [{"prompt": f"{i} + {i} = ?", "answer": str(2 * i), "level": {"digits": len(str(i))}} for i in range(400)]


def write(path, rows):
    """`rows` in the format that the name says."""
    if path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    elif path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=64)
    else:
        table = pa.Table.from_pylist(rows)
        new = pa.ipc.new_stream if path.stem.endswith("stream") else pa.ipc.new_file
        with new(path, table.schema) as writer:
            writer.write_table(table, max_chunksize=50)
    return str(path)


def opened(split="train", **options):
    return open_prompts(DataSection(source="files", name="sums", options=options), TASK, split)


def payloads(data):
    return [dict(data[i].payload) for i in range(len(data))]


FORMATS = ["sums.jsonl", "sums.parquet", "sums.arrow", "sums_stream.arrow"]


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_gives_the_same_rows_with_all_their_columns(tmp_path, name):
    data = opened(files={"train": [write(tmp_path / name, ROWS)]})
    assert payloads(data) == ROWS
    assert data[7].prompt_id.startswith("sums/") and data[7].task == "question"


@pytest.mark.parametrize("name", FORMATS)
def test_split_by_content_is_a_partition_that_no_file_format_or_order_changes(tmp_path, name):
    one, other = write(tmp_path / name, ROWS), write(tmp_path / "reversed.jsonl", ROWS[::-1])
    for split, about in (("train", 320), ("validation", 40), ("test", 40)):
        found = payloads(opened(split, files=[one]))
        assert sorted(found, key=str) == sorted(payloads(opened(split, files=[other])), key=str)
        assert abs(len(found) - about) < 25
    homes = [row["prompt"] for split in ("train", "validation", "test") for row in payloads(opened(split, files=[one]))]
    assert sorted(homes) == sorted(row["prompt"] for row in ROWS)


def test_equal_prompts_are_in_one_split_whatever_else_their_rows_say(tmp_path):
    doubled = [row | {"source": source} for row in ROWS for source in ("a", "b")]
    path = write(tmp_path / "doubled.jsonl", doubled)
    sources = [{row["source"] for row in payloads(opened(s, files=[path]))} for s in ("train", "validation", "test")]
    asked = [{row["prompt"] for row in payloads(opened(s, files=[path]))} for s in ("train", "validation", "test")]
    assert sources == [{"a", "b"}] * 3
    assert not asked[0] & asked[1] and not asked[0] & asked[2] and not asked[1] & asked[2]


def test_the_share_that_is_held_out_can_be_chosen(tmp_path):
    path = write(tmp_path / "sums.jsonl", ROWS)
    assert 160 < len(opened(files=[path], hold_out=0.5)) < 240


def test_several_files_follow_one_another_and_a_star_stands_for_many(tmp_path):
    for number in range(3):
        write(tmp_path / f"part-{number}.jsonl", ROWS[number * 10 : number * 10 + 10])
    assert payloads(opened(files={"train": [str(tmp_path / "part-*.jsonl")]})) == ROWS[:30]


def test_messages_are_kept_as_messages_without_the_nulls_that_arrow_adds(tmp_path):
    call = {"role": "assistant", "content": None, "tool_calls": [{"name": "add"}]}
    rows = [
        {"messages": [{"role": "user", "content": "hi"}]},
        {"messages": [{"role": "user", "content": "hi"}, call, {"role": "tool", "content": "3", "name": "add"}]},
    ]
    data = opened(files={"train": [write(tmp_path / "chat.parquet", rows)]})
    assert [row["messages"] for row in payloads(data)] == [row["messages"] for row in rows]


def test_a_prompt_column_may_hold_messages(tmp_path):
    messages = [{"role": "user", "content": "hi"}]
    data = opened(files={"train": [write(tmp_path / "chat.jsonl", [{"prompt": messages, "answer": "ho"}])]})
    assert payloads(data) == [{"messages": messages, "answer": "ho"}]


def test_text_beyond_ascii_and_blank_lines_move_no_row(tmp_path):
    path = tmp_path / "odd.jsonl"
    path.write_text('\n{"prompt": "日本 🎈"}\n\n   \n{"prompt": "ü", "answer": "é"}', encoding="utf-8")
    data = opened(files={"train": [str(path)]})
    assert payloads(data) == [{"prompt": "日本 🎈"}, {"prompt": "ü", "answer": "é"}]


BAD_ROWS = {
    '{"prompt": "half': "is no JSON",
    '["prompt"]': "is a list, and not a table",
    '{"question": "where?"}': "has neither a text 'prompt' nor 'messages'",
    '{"prompt": ""}': "has neither a text 'prompt' nor 'messages'",
    '{"messages": []}': "are no list of messages",
    '{"messages": [{"role": "user", "content": "a"}, {"content": "b"}]}': "its message 1 has no role or no content",
    '{"prompt": "a", "weight": NaN}': "NaN is no JSON value",
}


@pytest.mark.parametrize("line", BAD_ROWS)
def test_a_bad_row_is_named_by_file_and_line(tmp_path, line):
    path = tmp_path / "bad.jsonl"
    path.write_text('{"prompt": "good"}\n\n' + line + "\n")
    with pytest.raises(UserError, match=f"bad.jsonl, line 3.*{re.escape(BAD_ROWS[line])}"):
        opened(files={"train": [str(path)]})


def test_a_column_that_is_no_json_is_named_by_row(tmp_path):
    path = write(tmp_path / "bytes.parquet", [{"prompt": "a", "image": None}, {"prompt": "b", "image": b"\x89PNG"}])
    with pytest.raises(UserError, match=r"bytes.parquet, row 2, column image: a bytes is no JSON value"):
        opened(files={"train": [path]})


def test_a_prompt_that_is_trained_on_and_held_out_is_refused_by_both_its_places(tmp_path):
    train = write(tmp_path / "train.jsonl", ROWS[:10])
    test = write(tmp_path / "test.jsonl", [*ROWS[20:25], ROWS[3] | {"answer": "other"}])
    with pytest.raises(UserError, match=r"train.jsonl, line 4: asks what .*test.jsonl, line 6 of split 'test' asks"):
        opened(files={"train": [train], "test": [test]})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"files": ["{folder}/none-*.jsonl"]}, "matches no file"),
        ({"files": ["{folder}/notes.txt"]}, "is of no kind that is read here"),
        ({"files": ["{folder}/torn.parquet"]}, "torn.parquet: cannot be read"),
        ({"files": ["{folder}/torn.arrow"]}, "torn.arrow: cannot be read"),
        ({"files": []}, "at least 1 item"),
        ({"files": ["{folder}/a.jsonl"], "holdout": 0.1}, r"data.options.holdout is unknown \(did you mean hold_out"),
        ({"files": {"test": ["{folder}/a.jsonl"]}}, "has no split 'train'"),
        ({"files": ["{folder}/one.jsonl"]}, "split 'train' is empty|split 'test' is empty"),
    ],
)
def test_files_that_cannot_be_are_refused(tmp_path, options, message):
    for name in ("notes.txt", "torn.parquet", "torn.arrow"):
        (tmp_path / name).write_text("PAR1 not really")
    write(tmp_path / "a.jsonl", ROWS)
    write(tmp_path / "one.jsonl", ROWS[:1])
    options = json.loads(json.dumps(options).replace("{folder}", str(tmp_path)))
    with pytest.raises(UserError, match=message):
        opened("train", **options)
        opened("test", **options)


def test_a_file_is_read_once_for_all_splits_and_again_when_it_changes(tmp_path, monkeypatch):
    path, read = write(tmp_path / "sums.jsonl", ROWS), []
    monkeypatch.setattr(files, "_reader", lambda path: read.append(path) or files.JsonLines(path))
    for split in ("train", "validation", "test", "train"):
        opened(split, files=[path])
    assert len(read) == 1
    write(tmp_path / "sums.jsonl", ROWS[:50])
    assert len(opened(files=[path])) < 50 and len(read) == 2


def test_threads_read_the_same_rows(tmp_path):
    data = opened(files={"train": [write(tmp_path / "sums.jsonl", ROWS)]})
    results = [None] * 4
    threads = [threading.Thread(target=lambda i=i: results.__setitem__(i, payloads(data))) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [ROWS] * 4
