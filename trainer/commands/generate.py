"""Continue a text with a trained model: `reprise generate CHECKPOINT --prompt TEXT`.

The same model, prompt and options give the same text. The exit status is 0, or 2 if the command fails.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from models.config import ModelConfig
from reprise.errors import ConfigError
from reprise.format import MANIFEST
from reprise.loading import open_checkpoint
from reprise.storage import exists
from reprise.stores import files_of
from trainer.commands.arguments import amount, any_path, local_path, natural, positive
from trainer.commands.frame import FINE, framed
from trainer.data.text import BYTES, TOKENIZER, Encoder, bytes_encoder, open_encoder, prompt_tokens
from trainer.generate.sampling import Sampling, continue_with
from trainer.interop.open_model import open_model


def generate(options: argparse.Namespace) -> int:
    """Print the prompt with its continuation, and return the exit status."""
    files, device = files_of(options.checkpoint), torch.device("cpu")
    model, folder = open_model(options.checkpoint, device, options.base, files, averages=options.ema)
    encoder = _encoder(options.tokenizer, folder, model.config)
    prompt = prompt_tokens(encoder, options.prompt, model.config.vocab_size)
    sampling = Sampling(options.temperature, options.top_k, options.seed)
    following = continue_with(model, prompt, sampling, max_new_tokens=options.max_new_tokens)
    print(encoder.decode([*prompt, *following]))
    return FINE


def _encoder(tokenizer: str | None, folder: Path, model: ModelConfig) -> Encoder:
    """Return the encoder for `tokenizer`, or from the model's folder, or for bytes if the vocabulary size fits."""
    tokenizer_file = _own_tokenizer(folder) if tokenizer is None else None
    if tokenizer_file is not None and exists(tokenizer_file):
        return open_encoder(tokenizer_file)
    if tokenizer is None and (tokenizer_file is None or model.vocab_size != bytes_encoder().vocab_size):
        raise ConfigError(
            "The model's tokenizer is not known",
            where=folder,
            found=f"a vocabulary of {model.vocab_size} tokens and no "
            f"{'undamaged ' if tokenizer_file is None else ''}{TOKENIZER}",
            fix=f"Pass it with --tokenizer: a {TOKENIZER}, or {BYTES}.",
        )
    return open_encoder(tokenizer)


def _own_tokenizer(folder: Path) -> Path | None:
    """Return the path to a model's tokenizer, which may not exist, or None if a checkpoint has lost its tokenizer."""
    if not exists(folder / MANIFEST):
        return folder / TOKENIZER
    checkpoint = open_checkpoint(folder, files_of(folder), may_lack=True)
    return None if TOKENIZER in checkpoint.lacking else folder / TOKENIZER


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    where = "a run for its newest checkpoint, an iter_ folder, a URL of these, or a model folder of transformers"
    parser.add_argument("checkpoint", type=any_path, metavar="CHECKPOINT", help=where)
    parser.add_argument(
        "--base", type=local_path, metavar="BASE", help="the base weights under the checkpoint's adapters"
    )
    parser.add_argument("--ema", action="store_true", help="use the moving averages instead of the weights")
    parser.add_argument("--prompt", default="", metavar="TEXT", help="text to continue; empty starts a new document")
    parser.add_argument("--tokenizer", metavar="NAME", help="bytes, or a tokenizer.json; by default the model's own")
    parser.add_argument(
        "--max-new-tokens", type=positive, default=100, metavar="N", help="tokens to append (%(default)s)"
    )
    parser.add_argument(
        "--temperature", type=amount, default=0.0, metavar="T", help="0 always picks the most likely token"
    )
    parser.add_argument(
        "--top-k", type=natural, default=0, metavar="K", help="sample from the K most likely tokens; 0 for all"
    )
    parser.add_argument("--seed", type=natural, default=0, metavar="S", help="sampling seed (%(default)s)")


main = framed(generate, _add_arguments)
