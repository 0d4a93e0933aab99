"""Makes golden folders anew: fresh random weights, and what the public transformers package computes with them.

    python -m venv reference && reference/bin/pip install torch "transformers>=5.18" safetensors
    reference/bin/python tests/golden/recreate.py --folder=kimi_tiny --seed=1 --out=fresh/kimi_tiny

writes config.json, model.safetensors (names, shapes and dtypes of the folder here) and reference.safetensors
(input_ids, logits, hidden states h0 ... hn; the last one is after the final norm). Neither package is needed by the
project or its tests. With --out on the folder itself the committed arrays are replaced, and the tests hold the new ones
to the same tolerance.
"""

import argparse
import math
import pathlib
import shutil

import numpy as np
from safetensors.numpy import load_file, save_file

HERE = pathlib.Path(__file__).resolve().parent


def weight(rng: np.random.Generator, name: str, shape: tuple[int, ...]) -> np.ndarray:
    """A random tensor of a size at which every part of the model matters to the logits."""
    if name.endswith("A_log"):
        value = np.log(rng.uniform(1, 16, shape))
    elif name.endswith("dt_bias"):
        step = np.exp(rng.uniform(math.log(1e-3), math.log(0.1), shape))
        value = step + np.log(-np.expm1(-step))
    elif name.endswith("e_score_correction_bias"):
        value = 0.1 * rng.normal(size=shape)
    elif len(shape) == 1:
        value = 1 + 0.1 * rng.normal(size=shape)
    elif "embed_tokens" in name:
        value = rng.normal(size=shape)
    else:
        value = rng.normal(size=shape) / math.sqrt(math.prod(shape[1:]))
    return value.astype(np.float32)


def write_checkpoint(source: pathlib.Path, out: pathlib.Path, seed: int) -> None:
    """Random weights under the names and shapes of `source`."""
    rng = np.random.default_rng(seed)
    shapes = {name: tensor.shape for name, tensor in load_file(source / "model.safetensors").items()}
    out.mkdir(parents=True, exist_ok=True)
    if out != source:
        shutil.copyfile(source / "config.json", out / "config.json")
    tensors = {name: weight(rng, name, shapes[name]) for name in sorted(shapes)}
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})


def write_reference(source: pathlib.Path, out: pathlib.Path, seed: int) -> None:
    """Logits and hidden states of transformers, in float32 on the CPU."""
    import torch
    from transformers import AutoModelForCausalLM

    options = dict(dtype=torch.float32, attn_implementation="eager", output_loading_info=True)
    model, info = AutoModelForCausalLM.from_pretrained(out, **options)
    wrong = {key: names for key, names in info.items() if names}
    if wrong:
        raise SystemExit(f"transformers did not take every tensor: {wrong}")
    shape = load_file(source / "reference.safetensors")["input_ids"].shape
    ids = np.random.default_rng(seed + 1).integers(0, model.config.vocab_size, shape)
    with torch.no_grad():
        result = model.eval()(torch.tensor(ids), output_hidden_states=True, use_cache=False)
    arrays = {f"h{i}": hidden.numpy() for i, hidden in enumerate(result.hidden_states)}
    arrays |= {"input_ids": ids.astype(np.int64), "logits": result.logits.numpy()}
    save_file({name: np.ascontiguousarray(x) for name, x in arrays.items()}, out / "reference.safetensors")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", choices=["kimi_tiny", "dsv2_tiny"], required=True)
    parser.add_argument("--out", type=pathlib.Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    source, out = HERE / args.folder, args.out.resolve()
    write_checkpoint(source, out, args.seed)
    write_reference(source, out, args.seed)
    print(f"wrote {out}")


if __name__ == "__main__":
    main()
