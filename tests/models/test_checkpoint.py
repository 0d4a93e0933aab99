"""Loading and saving: strict names and shapes, shards, dtypes, damaged files."""

import importlib.util
import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

from vestige_jax import models
from vestige_jax.models.checkpoint import entry


@pytest.fixture
def folder(golden, tmp_path):
    """A copy of the golden checkpoint that a test may damage."""
    return shutil.copytree(golden / "kimi_tiny", tmp_path / "model")


def edit(folder, change):
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def test_missing_tensors_are_named(folder):
    edit(folder, lambda t: [t.pop("model.layers.0.self_attn.dt_bias"), t.pop("model.layers.2.mlp_none", None)])
    with pytest.raises(ValueError, match=r"missing: model\.layers\.0\.self_attn\.dt_bias$"):
        models.load(folder)


def test_one_missing_expert_is_named(folder):
    edit(folder, lambda t: t.pop("model.layers.2.block_sparse_moe.experts.3.w2.weight"))
    with pytest.raises(ValueError, match=r"missing: model\.layers\.2\.block_sparse_moe\.experts\.3\.w2\.weight$"):
        models.load(folder)


def test_extra_tensors_are_named(folder):
    """A bias that the architecture has no place for would be dropped in silence by a lenient loader."""
    edit(folder, lambda t: t.update({"model.layers.0.self_attn.q_proj.bias": np.zeros(48, np.float32)}))
    with pytest.raises(ValueError, match=r"extra: model\.layers\.0\.self_attn\.q_proj\.bias$"):
        models.load(folder)


def test_misshaped_tensors_are_named_with_both_shapes(folder):
    """Transposed, a square kernel would fit in silence; this one is not square."""
    name = "model.layers.2.self_attn.kv_a_proj_with_mqa.weight"
    edit(folder, lambda t: t.update({name: np.ascontiguousarray(t[name].T)}))
    with pytest.raises(ValueError, match=r"misshaped: .*kv_a_proj_with_mqa\.weight is \(48, 32\), expected \(32, 48\)"):
        models.load(folder)


@pytest.mark.parametrize("value", [np.nan, -np.inf])
@pytest.mark.parametrize("name", ["lm_head.weight", "model.layers.2.block_sparse_moe.experts.3.w2.weight"])
def test_weights_that_are_not_finite_are_named(folder, name, value):
    def change(tensors):
        tensors[name][1, 2:4] = value

    edit(folder, change)
    with pytest.raises(ValueError, match=rf"model\.safetensors: 2 of the \d+ values of {name} are not finite"):
        models.load(folder)


def test_all_problems_are_told_at_once(folder):
    edit(folder, lambda t: [t.pop("lm_head.weight"), t.update(extra=np.zeros(3, np.float32))])
    with pytest.raises(ValueError, match=r"missing: lm_head\.weight; extra: extra"):
        models.load(folder)


def test_long_lists_are_cut(folder):
    edit(folder, lambda t: [t.pop(name) for name in list(t) if "experts" in name])
    with pytest.raises(ValueError, match=r"and \d+ more"):
        models.load(folder)


@pytest.mark.parametrize("size", [4, 1000, 400_000])
def test_truncated_file_is_named(folder, size):
    whole = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(whole[:size])
    with pytest.raises(ValueError, match=rf"model\.safetensors \({size} bytes\) is damaged or truncated"):
        models.load(folder)


def test_missing_files_are_named(folder, tmp_path):
    (folder / "model.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"model\.safetensors"):
        models.load(folder)
    with pytest.raises(FileNotFoundError, match="nowhere"):
        models.load(tmp_path / "nowhere")


def shard(folder, count):
    """Splits model.safetensors into shards with an index, tensors of one layer spread over all of them."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = {name: f"model-{i % count + 1:05}-of-{count:05}.safetensors" for i, name in enumerate(tensors)}
    for file in set(names.values()):
        save_file({n: t for n, t in tensors.items() if names[n] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": names}))


def test_shards_equal_one_file(folder, kimi):
    shard(folder, 3)
    for a, b in zip(jax.tree.leaves(nnx.state(kimi)), jax.tree.leaves(nnx.state(models.load(folder))), strict=True):
        np.testing.assert_array_equal(a, b)


def test_missing_shard_is_named(folder):
    shard(folder, 3)
    (folder / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match="model-00002-of-00003"):
        models.load(folder)


def test_damaged_index_is_named(folder):
    (folder / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(ValueError, match=r"index\.json"):
        models.load(folder)


def test_save_writes_the_same_tensors(golden, kimi, tmp_path):
    """Names, shapes and bits of the original layout, so another implementation can read what is saved."""
    models.save(tmp_path, kimi)
    ours, theirs = load_file(tmp_path / "model.safetensors"), load_file(golden / "kimi_tiny" / "model.safetensors")
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        np.testing.assert_array_equal(ours[name], tensor, err_msg=name)
    assert models.load(tmp_path).config == kimi.config


def test_bfloat16_round_trip(golden, tmp_path):
    low = models.load(golden / "kimi_tiny", dtype=jnp.bfloat16)
    models.save(tmp_path, low)
    for a, b in zip(
        jax.tree.leaves(nnx.state(low)),
        jax.tree.leaves(nnx.state(models.load(tmp_path, dtype=jnp.bfloat16))),
        strict=True,
    ):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a, b)


def test_the_48b_layout(golden):
    """The public 48B config asks for 20,493 tensors with 49,122,681,728 parameters, named as in its index."""
    config = models.ModelConfig.from_json(golden / "kimi_linear_48b_config.json")
    abstract = nnx.eval_shape(lambda: models.Decoder(config, rngs=nnx.Rngs(0), dtype=jnp.bfloat16))
    entries = [entry(where, param.shape) for where, param in nnx.to_flat_state(nnx.state(abstract))]
    shapes = {name: item.shape for item in entries for name in item.names}
    assert len(shapes) == 20_493
    assert sum(int(np.prod(shape)) for shape in shapes.values()) == 49_122_681_728
    assert shapes["model.layers.26.self_attn.kv_b_proj.weight"] == (8192, 512)
    assert shapes["model.layers.0.self_attn.A_log"] == (1, 1, 32, 1)
    assert shapes["model.layers.1.block_sparse_moe.experts.255.w2.weight"] == (2304, 1024)
    assert shapes["model.layers.1.block_sparse_moe.gate.e_score_correction_bias"] == (256,)
    assert shapes["model.layers.0.mlp.gate_proj.weight"] == (9216, 2304)


def test_recreated_golden_weights_load(golden, kimi, tmp_path):
    """The script's own half; the other half needs transformers."""
    found = importlib.util.spec_from_file_location("recreate", golden / "recreate.py")
    recreate = importlib.util.module_from_spec(found)
    found.loader.exec_module(recreate)
    recreate.write_checkpoint(golden / "kimi_tiny", tmp_path / "fresh", seed=3)
    fresh = models.load(tmp_path / "fresh")
    assert fresh.config == kimi.config
    assert np.abs(fresh.lm_head[...] - kimi.lm_head[...]).max() > 0.1
