"""Tiny expert checkpoints in the layouts of quantisation libraries, written by their own code.

    python scripts/library_checkpoints.py tests/data/checkpoints

in an environment with compressed-tensors 0.20.0, nvidia-modelopt 0.47.0 and amd-quark 0.13, as the
files here were; of a library that is not there its files stay as they are. Each file holds two
experts of one layer, and under "values.*" what the library itself reads back of the last one.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from safetensors.torch import save_file

E, I, H = 2, 32, 32
SHAPES = {"gate_proj": (I, H), "up_proj": (I, H), "down_proj": (H, I)}


def compressed(weight: torch.Tensor, preset: str) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationStrategy, preset_name_to_scheme
    from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

    kinds = {
        "NVFP4": "nvfp4-pack-quantized", "MXFP4": "mxfp4-pack-quantized",
        "FP8_DYNAMIC": "float-quantized", "FP8_BLOCK": "float-quantized",
        "MXFP8": "mxfp8-quantized",
    }  # fmt: skip
    scheme = preset_name_to_scheme(preset, ["Linear"])
    args = scheme.weights
    made = {"weight": weight}
    if args.strategy in (QuantizationStrategy.GROUP, QuantizationStrategy.TENSOR_GROUP):
        groups = weight.unflatten(-1, (-1, args.group_size))
        low, high = groups.amin(-1), groups.amax(-1)
    elif args.strategy == QuantizationStrategy.BLOCK:
        low, high = weight.amin().view(1, 1), weight.amax().view(1, 1)
    else:
        low, high = weight.amin(-1, keepdim=True), weight.amax(-1, keepdim=True)
    if preset == "NVFP4":
        made["weight_global_scale"] = generate_gparam(weight.amin(), weight.amax()).reshape(1)
        made["input_global_scale"] = torch.tensor([2688.0 / 12.0])
    scale, _ = calculate_qparams(low, high, args, made.get("weight_global_scale"))
    made["weight_scale"] = scale
    compressor = BaseCompressor.get_value_from_registry(kinds[preset])
    made = compressor.compress(made, scheme)
    back = compressor.decompress(dict(made), scheme)["weight"]
    return made, back


def modelopt(weight: torch.Tensor, name: str) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    if name == "nvfp4":
        from modelopt.torch.quantization.qtensor.nvfp4_tensor import NVFP4QTensor

        made, scale, scale_2 = NVFP4QTensor.quantize(weight, 16)
        back = made.dequantize(
            torch.float32, scale=scale, double_scale=scale_2, block_sizes={-1: 16}
        )
        tensors = {"weight_scale_2": scale_2, "input_scale": torch.tensor(12.0 / 2688.0)}
        return {"weight": made._quantized_data, "weight_scale": scale, **tensors}, back
    from modelopt.torch.quantization.qtensor.mxfp4_tensor import MXFP4QTensor

    made, scale = MXFP4QTensor.quantize(weight, 32)
    scale = scale.reshape(weight.shape[0], -1)
    back = made.dequantize(torch.float32, scale=scale.reshape(-1, 1), block_sizes={-1: 32})
    return {"weight": made._quantized_data, "weight_scale": scale}, back


def quark(weight: torch.Tensor, name: str) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    from quark.torch.export.nn.modules.realquantizer import get_real_quantizer
    from quark.torch.quantization.config import config
    from quark.torch.quantization.tensor_quantize import FakeQuantizeBase

    makers = {
        "mxfp4": lambda: config.OCP_MXFP4Spec(ch_axis=-1, is_dynamic=False),
        "fp8_channel": lambda: config.FP8E4M3PerChannelSpec(ch_axis=0, is_dynamic=False),
        "fp8_tensor": lambda: config.FP8E4M3PerTensorSpec(is_dynamic=False),
    }
    spec, cpu = makers[name]().to_quantization_spec(), torch.device("cpu")
    fake = FakeQuantizeBase.get_fake_quantize(spec, device=cpu)
    fake.enable_observer()
    fake.enable_fake_quant()
    back = fake(weight)
    real = get_real_quantizer(
        qspec=spec, quantizer=fake, reorder=False, real_quantized=False, device=cpu,
        float_dtype=torch.float32,
    )  # fmt: skip
    made = {"weight": real.to_real_quantize_params(weight)}
    real.maybe_convert_and_transpose_scale()
    return made | {"weight_scale": real.scale}, back


def main() -> None:
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    makers = {
        "compressed_tensors_nvfp4": lambda w: compressed(w, "NVFP4"),
        "compressed_tensors_mxfp4": lambda w: compressed(w, "MXFP4"),
        "compressed_tensors_mxfp8": lambda w: compressed(w, "MXFP8"),
        "compressed_tensors_fp8_channel": lambda w: compressed(w, "FP8_DYNAMIC"),
        "compressed_tensors_fp8_block": lambda w: compressed(w, "FP8_BLOCK"),
        "modelopt_nvfp4": lambda w: modelopt(w, "nvfp4"),
        "modelopt_mxfp4": lambda w: modelopt(w, "mxfp4"),
        "quark_mxfp4": lambda w: quark(w, "mxfp4"),
        "quark_fp8_channel": lambda w: quark(w, "fp8_channel"),
        "quark_fp8_tensor": lambda w: quark(w, "fp8_tensor"),
    }
    for name, make in makers.items():
        try:
            make(torch.ones(I, H))
        except ImportError as error:
            print(f"{name} stays as it is: {error}")
            continue
        rng = torch.Generator().manual_seed(0)
        tensors = {}
        for expert in range(E):
            for linear, shape in SHAPES.items():
                head = f"model.layers.1.mlp.experts.{expert}.{linear}."
                made, back = make(torch.randn(shape, generator=rng) * 0.05)
                tensors |= {head + key: t.detach().clone().contiguous() for key, t in made.items()}
                if expert == E - 1:
                    tensors[f"values.{linear}"] = back.float().contiguous()
        save_file(tensors, folder / f"{name}.safetensors")
        print(name, {k.split(".")[-1]: (str(t.dtype), tuple(t.shape)) for k, t in tensors.items()})


if __name__ == "__main__":
    main()
