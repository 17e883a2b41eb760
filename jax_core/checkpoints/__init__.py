"""Models in files: Hugging Face folders and GGUF files in, Hugging Face folders and PEFT adapters out."""

from jax_core.checkpoints.checkpoint import Checkpoint, open_checkpoint
from jax_core.checkpoints.generation import GenerationDefaults
from jax_core.checkpoints.load import load_params, to_default_device, to_shardings
from jax_core.checkpoints.lora import write_adapter
from jax_core.checkpoints.write import write_checkpoint

__all__ = [
    "Checkpoint",
    "GenerationDefaults",
    "load_params",
    "open_checkpoint",
    "to_default_device",
    "to_shardings",
    "write_adapter",
    "write_checkpoint",
]
