"""What turns a few words, images and sound into tokens, written without a hub."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any


def write_json(path: Path, content: object) -> None:
    """Stock and patched starts write the same file at a time, and read it."""
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    partial.write_text(json.dumps(content))
    partial.rename(path)


def write_processor(folder: Path, patch_size: int) -> None:
    """Write what turns images and a few words into tokens, without a hub: Qwen2-VL's,
    or Qwen3-VL's with its patches of 16 pixels.
    """
    newer = patch_size == 16
    kind = "Qwen3VL" if newer else "Qwen2VL"
    least, most = (size * (2 * patch_size) ** 2 for size in (4, 2048))
    sizes = (
        {"size": {"shortest_edge": least, "longest_edge": most}}
        if newer
        else {"min_pixels": least, "max_pixels": most}
    )
    patches = {"patch_size": patch_size, "merge_size": 2, "temporal_patch_size": 2}
    files: dict[str, dict[str, Any]] = {
        "preprocessor_config.json": {
            "image_processor_type": "Qwen2VLImageProcessor",
            "processor_class": f"{kind}Processor",
        }
        | sizes
        | patches,
        "video_preprocessor_config.json": {
            "video_processor_type": f"{kind}VideoProcessor"
        }
        | sizes
        | patches,
    }
    write_tokenizer(folder, {"processor_class": f"{kind}Processor"})
    for name, content in files.items():
        write_json(folder / name, content)


def write_audio_processor(folder: Path, mel_bins: int) -> None:
    """Write what turns half a minute of sound into features: Whisper's."""
    kind = {"processor_class": "WhisperProcessor"}
    features = {
        "feature_extractor_type": "WhisperFeatureExtractor",
        "feature_size": mel_bins,
        "sampling_rate": 16000,
        "hop_length": 160,
        "chunk_length": 30,
        "n_fft": 400,
    }
    write_tokenizer(folder, kind | {"tokenizer_class": "WhisperTokenizerFast"})
    write_json(folder / "preprocessor_config.json", kind | features)


def write_tokenizer(folder: Path, config: dict[str, str]) -> None:
    """Write a tokenizer of a few words, those for images among them."""
    words = ["<unk>", "<s>", "</s>", "<|vision_start|>", "<|vision_end|>"]
    words += ["<|image_pad|>", "<|video_pad|>", "<|im_start|>", "<|im_end|>"]
    special = [
        {
            "id": token,
            "content": word,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": True,
        }
        for token, word in enumerate(words)
    ]
    tokenizer = {
        "version": "1.0",
        "added_tokens": special,
        "pre_tokenizer": {"type": "Whitespace"},
        "model": {
            "type": "WordLevel",
            "vocab": {word: token for token, word in enumerate(words)},
            "unk_token": words[0],
        },
    }
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": words[0],
        "bos_token": words[1],
        "eos_token": words[2],
    } | config
    write_json(folder / "tokenizer.json", tokenizer)
    write_json(folder / "tokenizer_config.json", config)
