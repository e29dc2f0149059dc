"""What Triton is told to load, for each kind of engine."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engines.native_package import read_model_config
from engines.onnx.intent import __path__ as intent_path
from engines.packaging import AdapterBerths, EngineDevice, EngineSpec, PackagingError, estimate_device_bytes, package
from engines.reference.checkpoint import load_tensors
from engines.reference.triton_config import PROCESS_BYTES
from tests.builders.checkpoints import knob_model, random_checkpoint, turn_knobs
from tests.unit.engines.engine_driver import open_model

INTENT = Path(next(iter(intent_path))) / "intent.onnx"


def names(tensors: Any) -> list[str]:
    """Names of configured tensors."""
    return [tensor["name"] for tensor in tensors]


def test_reference_package_is_complete_and_carries_its_settings(tmp_path: Path) -> None:
    """Auto-complete is off, so inputs, outputs and the decoupled policy are all there; parameters are strings."""
    spec = EngineSpec("reference", "m--1", str(random_checkpoint(tmp_path / "m")), "d1", 3, 1024, "unix:/x")
    packaged = package(spec)
    config: dict[str, Any] = packaged.config
    assert config["name"] == "m--1"
    assert config["model_transaction_policy"] == {"decoupled": True}
    assert names(config["input"])[0] == "text_input"
    assert [tensor["name"] for tensor in config["input"] if not tensor.get("optional")] == ["text_input"]
    assert {"text_output", "finish_reason", "num_output_tokens", "embedding"} < set(names(config["output"]))
    assert {name: value["string_value"] for name, value in config["parameters"].items()} == {
        "weights_path": spec.weights_path,
        "model_digest": "d1",
        "slots": "3",
        "kv_pool_tokens": "1024",
        "kvstore_address": "unix:/x",
    }
    assert list(packaged.files) == ["file:1/model.py"]
    json.dumps(config)
    compile(packaged.files["file:1/model.py"], "model.py", "exec")


def test_a_folder_without_a_checkpoint_is_refused(tmp_path: Path) -> None:
    """By name, before Triton hears of it."""
    for engine in ("reference", "vllm"):
        with pytest.raises(PackagingError, match=r"no config\.json"):
            package(EngineSpec(engine, "m", str(tmp_path)))
    with pytest.raises(PackagingError, match=r"one \.onnx file is expected, 0 found"):
        package(EngineSpec("onnx", "m", str(tmp_path)))
    with pytest.raises(PackagingError, match=r"config\.pbtxt"):
        package(EngineSpec("triton", "m", str(tmp_path)))


def test_reference_estimate_counts_float32_weights_and_the_pool(tmp_path: Path) -> None:
    """float16 on disk is float32 in memory; 1,000 tokens are 63 blocks of 16 in 2 layers of 2 heads of 8."""
    folder = random_checkpoint(tmp_path / "m", dtype="float16")
    weights = sum(tensor.nbytes for tensor in load_tensors(folder).values())
    pool = 63 * 16 * 2 * 2 * 2 * 8 * 4
    workspace = 4096 * (32 + 48) * 4
    spec = EngineSpec("reference", "m", str(folder), kv_pool_tokens=1000)
    assert estimate_device_bytes(spec) == PROCESS_BYTES + weights + pool + workspace
    tied = random_checkpoint(tmp_path / "tied", dtype="float16", tied_head=True)
    # The checkpoint lacks the head, the engine holds one: the same sum.
    assert estimate_device_bytes(EngineSpec("reference", "m", str(tied), kv_pool_tokens=1000)) == estimate_device_bytes(
        spec
    )


def test_native_package_takes_the_folder_as_it_is(tmp_path: Path) -> None:
    """config.pbtxt becomes JSON under the given name, every other file a `file:` entry with the bytes of now."""
    folder = knob_model(tmp_path / "k", tokens=5, device_bytes=1234)
    packaged = package(EngineSpec("triton", "k--9", str(folder)))
    assert packaged.config["name"] == "k--9"
    assert packaged.config["backend"] == "python"
    assert packaged.config["model_transaction_policy"] == {"decoupled": True}
    files = {"file:1/model.py", "file:knobs.json", "file:tokenizer.json", "file:tokenizer_config.json"}
    assert set(packaged.files) == files
    turn_knobs(folder, tokens=9)
    assert json.loads(package(EngineSpec("triton", "k", str(folder))).files["file:knobs.json"])["tokens"] == 9
    assert estimate_device_bytes(EngineSpec("triton", "k", str(folder))) == 1234


def test_native_estimate_without_a_declaration_is_the_size_of_the_files(tmp_path: Path) -> None:
    """All files but the configuration; a declaration that is no number is refused."""
    folder = knob_model(tmp_path / "k")
    total = sum(f.stat().st_size for f in folder.rglob("*") if f.is_file() and f.name != "config.pbtxt")
    spec = EngineSpec("triton", "k", str(folder))
    assert estimate_device_bytes(spec) == total
    with (folder / "config.pbtxt").open("a") as config:
        config.write('parameters { key: "device_bytes" value: { string_value: "much" } }\n')
    with pytest.raises(PackagingError, match="device_bytes"):
        estimate_device_bytes(spec)


def test_a_native_folder_without_a_version_or_with_a_broken_config_is_refused(tmp_path: Path) -> None:
    """Each with the reason."""
    folder = knob_model(tmp_path / "k")
    (folder / "1/model.py").unlink()
    with pytest.raises(PackagingError, match="no version folder"):
        package(EngineSpec("triton", "k", str(folder)))
    (folder / "config.pbtxt").write_text("backend: {")
    with pytest.raises(PackagingError, match="config"):
        read_model_config(folder)


def test_onnx_package_takes_its_tensors_from_the_graph() -> None:
    """The batch dimension is dynamic, so -1; a folder with one .onnx file works as the file does."""
    packaged = package(EngineSpec("onnx", "o", str(INTENT)))
    assert packaged.config["input"] == [{"name": "features", "data_type": "TYPE_FP32", "dims": [-1, 16]}]
    assert packaged.config["output"] == [
        {"name": "label", "data_type": "TYPE_INT64", "dims": [-1]},
        {"name": "probabilities", "data_type": "TYPE_FP32", "dims": [-1, 4]},
    ]
    assert package(EngineSpec("onnx", "o", str(INTENT.parent))).config == packaged.config
    assert estimate_device_bytes(EngineSpec("onnx", "o", str(INTENT))) > 2 * INTENT.stat().st_size


def test_what_is_no_onnx_model_is_refused(tmp_path: Path) -> None:
    """With its file name."""
    (tmp_path / "broken.onnx").write_bytes(b"not a graph")
    with pytest.raises(PackagingError, match=r"broken\.onnx"):
        package(EngineSpec("onnx", "o", str(tmp_path)))


def test_vllm_package_has_the_contract_of_that_backend(tmp_path: Path) -> None:
    """Every input that gateways send, none of the outputs that it never gives; the engine's arguments as model.json;
    two devices are tensor parallel. Tenants share no cache in vLLM, which that backend cannot salt."""
    folder = random_checkpoint(tmp_path / "m")
    spec = EngineSpec("vllm", "v", str(folder), slots=8, devices=(EngineDevice("a"), EngineDevice("b")))
    packaged = package(spec)
    assert set(names(packaged.config["input"])) >= {
        "text_input",
        "sampling_parameters",
        "return_logprobs",
        "roundhouse",
    }
    assert not set(names(packaged.config["output"])) & {"roundhouse", "embedding", "token_ids"}
    arguments = json.loads(packaged.files["file:1/model.json"])
    assert (arguments["model"], arguments["tensor_parallel_size"], arguments["max_num_seqs"]) == (str(folder), 2, 8)
    assert estimate_device_bytes(spec) > (folder / "model.safetensors").stat().st_size
    assert arguments["enable_prefix_caching"] is False
    assert packaged.config["parameters"]["ENABLE_VLLM_HEALTH_CHECK"] == {"string_value": "true"}  # type: ignore[index]


def test_a_vllm_model_on_one_device_uses_the_nodes_kvstore(tmp_path: Path) -> None:
    """By our connector, which recomputes what it cannot load; on two devices, or without a kvstore, it has none."""
    folder = random_checkpoint(tmp_path / "m")

    def arguments(**more: Any) -> dict[str, Any]:
        spec = EngineSpec("vllm", "v", str(folder), model_digest="sha256:ab", **more)
        return dict(json.loads(package(spec).files["file:1/model.json"]))

    transfer = arguments(kvstore_address="n1:8500", devices=(EngineDevice("a"),))["kv_transfer_config"]
    assert (transfer["kv_connector"], transfer["kv_role"]) == ("RoundhouseConnector", "kv_both")
    assert transfer["kv_connector_module_path"] == "engines.vllm.kv_connector"
    assert transfer["kv_load_failure_policy"] == "recompute"
    assert transfer["kv_connector_extra_config"] == {"kvstore_address": "n1:8500", "model_digest": "sha256:ab"}
    gang = (EngineDevice("a"), EngineDevice("b"))
    assert "kv_transfer_config" not in arguments(kvstore_address="n1:8500", devices=gang)
    assert "kv_transfer_config" not in arguments()


def test_a_vllm_model_with_room_for_adapters_names_them_in_advance(tmp_path: Path) -> None:
    """Three berths of load `ab`: what that backend reads; room for two at once, of rank 16 for 9, eight beside. Room is
    2 slots x 16 x (sides of all projections) x 2 layers x 2 bytes. Without room, or berths, none of it."""
    folder = random_checkpoint(tmp_path / "m")
    berths = AdapterBerths("ab", "/arena/b/v/ab", 3)
    spec = EngineSpec("vllm", "v", str(folder), adapter_slots=2, adapter_rank_max=9, berths=berths)
    files = package(spec).files
    names = {"ab-0": "/arena/b/v/ab/0", "ab-1": "/arena/b/v/ab/1", "ab-2": "/arena/b/v/ab/2"}
    assert json.loads(files["file:1/multi_lora.json"]) == names
    arguments = json.loads(files["file:1/model.json"])
    assert arguments["enable_lora"] is True
    assert [arguments[f"max_{each}"] for each in ("loras", "lora_rank", "cpu_loras")] == [2, 16, 8]
    sides = (32 + 32) + 2 * (16 + 32) + (32 + 32) + 3 * (48 + 32)
    plain = EngineSpec("vllm", "v", str(folder))
    assert estimate_device_bytes(spec) - estimate_device_bytes(plain) == 2 * 16 * sides * 2 * 2
    for without in (plain, EngineSpec("vllm", "v", str(folder), berths=berths)):
        assert "file:1/multi_lora.json" not in package(without).files
        assert "enable_lora" not in json.loads(package(without).files["file:1/model.json"])


def test_packaging_a_checkpoint_imports_no_array_library() -> None:
    """The loader packages; it must not pay for NumPy, onnxruntime or Triton's client to do so."""
    code = (
        "import sys; import engines.packaging, engines.reference.triton_config, engines.vllm.triton_config;"
        "print([m for m in ('numpy', 'onnxruntime', 'tritonclient', 'tokenizers') if m in sys.modules])"
    )
    root = Path(__file__).parents[3]
    answer = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True)
    assert answer.stdout.strip() == "[]"


def test_the_estimate_covers_what_is_held_and_not_much_more(tmp_path: Path) -> None:
    """Above the arrays of a loaded model by the working memory alone: 4,096 rows of 64 + 128 floats."""
    folder = random_checkpoint(tmp_path / "m", hidden_size=64, intermediate_size=128)
    pool = open_model(folder, kv_pool_tokens=2048).engine._decoder.pool
    held = pool.keys.nbytes + pool.values.nbytes + sum(np.asarray(t).nbytes for t in load_tensors(folder).values())
    estimate = estimate_device_bytes(EngineSpec("reference", "m", str(folder), kv_pool_tokens=2048)) - PROCESS_BYTES
    assert estimate == held + 4096 * (64 + 128) * 4
