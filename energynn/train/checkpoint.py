"""Weights on disk: written whole or not at all, and read only into the network that they were made for."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import torch


def save_weights(path: Path, model: torch.nn.Module, architecture: dict) -> str:
    """Write the weights with the sizes of their network; return the file's SHA-256."""
    temporary = path.with_suffix(".part")
    with open(temporary, "wb") as file:
        torch.save({"architecture": architecture, "state_dict": model.state_dict()}, file)
        file.flush()
        os.fsync(file.fileno())
    with open(temporary, "rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    os.replace(temporary, path)
    return digest


def load_weights(path: Path, model: torch.nn.Module, architecture: dict) -> None:
    """Put saved weights into the model. Raises ValueError if there are none, or those of another architecture."""
    if not path.is_file():
        raise ValueError(f"initial_run: no weights in {path}; make that run first, with save_weights=True")
    try:
        saved = torch.load(path, map_location="cpu", weights_only=True)
        theirs, state_dict = saved["architecture"], saved["state_dict"]
    except Exception as error:  # torch.load raises whatever the damaged bytes lead it to
        raise ValueError(f"initial_run: {path} is damaged ({type(error).__name__}); make that run again") from error
    if theirs != architecture:
        other = ", ".join(
            f"{name} {theirs.get(name)} there, {architecture.get(name)} here"
            for name in sorted(theirs.keys() | architecture.keys())
            if theirs.get(name) != architecture.get(name)
        )
        raise ValueError(f"initial_run: {path} holds another architecture ({other}); choose the same sizes")
    model.load_state_dict(state_dict)
