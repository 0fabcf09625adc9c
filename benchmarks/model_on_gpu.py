"""A real language model on the GPU: the same greedy tokens as on the CPU, and tokens a second.

    python benchmarks/model_on_gpu.py QUANTIZED [--source PLAIN] [--tokens 64] [--out FILE]

QUANTIZED is what ``hadaquant quantize`` wrote, its rotation and format as they are. Each linear is given what it reads
on the CPU: its coded input has to be the same bytes, an INT8 output the same bits, an FP4 output within the bound of
products: an error against the float64 product of at most twice torch's in the same dtype, and a float32 rounding.
Then both decode. All but the linears runs in float64, so that linears read the same on both devices; in float32 a
difference in the last bit of a norm turns a code, and thirty layers make that as large as the quantization's own noise.
Reported: how many tokens agree, how far the logits are apart while the contexts agree, and at the first token that
differs the margin between the two candidates. With ``--source``, the unquantized folder, the
speed of both at batch 1: a whole step (embedding to argmax) as one CUDA graph, in bfloat16. Appends to
results/model.jsonl.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from decoding import Decoder, in_double
from tokenizers import Tokenizer
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

import hadaquant as hq
from hadaquant.bench.record import append

OUT = Path(__file__).parent / "results" / "model.jsonl"
PROMPTS = (
    "The history of the steam engine begins",
    "To make bread you need flour, water,",
    "In mathematics, a Hadamard matrix is",
    "Once upon a time, in a small village by the sea,",
)


def greedy(model: nn.Module, ids: list[int], tokens: int) -> tuple[Tensor, Tensor]:
    """Greedy tokens [tokens] and their logits [tokens, vocabulary], on the CPU."""
    made, logits = Decoder(model, len(ids) + tokens).generate(ids, tokens)
    return made.cpu(), logits.float().cpu()


def compare(prompt: str, here: tuple[Tensor, Tensor], there: tuple[Tensor, Tensor]) -> dict[str, object]:
    """How far two greedy runs of one prompt agree. Logits compare while the tokens before them are the same."""
    (a, logits_a), (b, logits_b) = here, there
    same = int((a == b).long().cumprod(0).sum())
    comparable = min(same + 1, len(a))
    best = logits_a[:comparable].topk(2).values
    row: dict[str, object] = {
        "prompt": prompt,
        "tokens": len(a),
        "same_tokens": same,
        "largest_logit_difference": (logits_a[:comparable] - logits_b[:comparable]).abs().max().item(),
        "smallest_margin": (best[:, 0] - best[:, 1]).min().item(),
    }
    if same < len(a):
        first, other = (logits_a[same, t].item() for t in (a[same], b[same]))
        row["first_difference"] = {"at": same, "cpu": int(a[same]), "gpu": int(b[same]), "margin": first - other}
    return row


def linears(cpu: nn.Module, gpu: nn.Module, ids: list[int], dtype: torch.dtype) -> dict[str, object]:
    """Every linear of the GPU's model on what the CPU's reads for one prompt, in a dtype."""
    inputs: dict[str, Tensor] = {}

    def keep(name: str) -> Callable[..., None]:
        return lambda _, arguments: inputs.update({name: arguments[0].detach().to(dtype)})

    ours = {name: m for name, m in cpu.named_modules() if isinstance(m, hq.RotatedLinear)}
    hooks = [m.register_forward_pre_hook(keep(name)) for name, m in ours.items()]
    cpu(torch.tensor([ids]))
    for hook in hooks:
        hook.remove()
    differing_inputs = differing_outputs = 0
    share = 0.0
    for name, layer in ours.items():
        there, x = gpu.get_submodule(name), inputs[name]
        device = there.codes.device  # type: ignore[union-attr]
        coded = [hq.quantize(t, layer.format, rotation=layer.rotation) for t in (x, x.to(device))]
        pairs = ((getattr(coded[0], part), getattr(coded[1], part).cpu()) for part in ("codes", "scales"))
        differing_inputs += sum(int((a.view(torch.uint8) != b.view(torch.uint8)).sum()) for a, b in pairs)
        y, here = there(x.to(device)).cpu(), layer(x)
        differing_outputs += int((y != here).sum())
        values, weight = coded[0].dequantize(), layer.dequantized_weight()
        exact, torchs = values.double() @ weight.double().T, values @ weight.T
        if layer.bias is not None:
            exact, torchs = exact + layer.bias.double(), torchs + layer.bias
        error, allowed = ((t.double() - exact).norm().item() for t in (y, torchs.to(dtype)))
        share = max(share, error / (2 * allowed + 2.0**-22 * exact.norm().item()))
    return {
        "dtype": str(dtype).removeprefix("torch."),
        "layers": len(ours),
        "differing_inputs": differing_inputs,
        "differing_outputs": differing_outputs,
        "share_of_bound": share,
    }


def tokens_a_second(model: nn.Module, device: torch.device, tokens: int, front_ends: bool) -> float:
    """Greedy decoding at batch 1, a CUDA graph a token; median of five runs."""
    decoder = Decoder(model, tokens + 8, front_ends)
    decoder.reset(1)
    for _ in range(3):
        decoder.step()
    run = decoder.step
    if device.type == "cuda":
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            decoder.step()
        run = graph.replay
    times = []
    for _ in range(5):
        decoder.reset(1)
        wait(device)
        start = time.perf_counter()
        for _ in range(tokens):
            run()
        wait(device)
        times.append(time.perf_counter() - start)
    return tokens / statistics.median(times)


def wait(device: torch.device) -> None:
    """Until the device has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("quantized", type=Path)
    parser.add_argument("--source", type=Path)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--prompts", type=int, default=len(PROMPTS), help="how many of them")
    parser.add_argument("--device", default="cuda", help="cuda, or cpu for a trial without a GPU")
    parser.add_argument("--out", type=Path, default=OUT)
    options = parser.parse_args()
    device = torch.device(options.device)

    tokenizer = Tokenizer.from_file(str(options.quantized / "tokenizer.json"))
    ids = [tokenizer.encode(prompt).ids for prompt in PROMPTS]
    cpu, gpu = (hq.load(options.quantized, device=d, dtype=torch.float32) for d in ("cpu", device))
    layer = next(m for m in gpu.modules() if isinstance(m, hq.RotatedLinear))
    what = {"model": options.quantized.name, "format": layer.format.name, "rotation": str(layer.rotation)}
    rows: list[dict[str, object]] = []

    def tell(kind: str, row: dict[str, object]) -> None:
        rows.append({"what": kind, **what, **row})
        print(json.dumps(rows[-1]), flush=True)

    with torch.inference_mode():
        for dtype in (torch.float32, torch.bfloat16):
            tell("linears", linears(cpu, gpu, ids[0], dtype))
        cpu, gpu = in_double(cpu), in_double(gpu)
        for prompt, tokens in zip(PROMPTS[: options.prompts], ids, strict=False):
            tell("greedy", compare(prompt, *(greedy(model, tokens, options.tokens) for model in (cpu, gpu))))
        if options.source is not None:
            plain = AutoModelForCausalLM.from_pretrained(options.source, dtype=torch.bfloat16).to(device).eval()
            ours = hq.load(options.quantized, device=device, dtype=torch.bfloat16)
            name = layer.format.name
            ways = {"bfloat16": (plain, False), name: (ours, False), f"{name}, front ends": (ours, True)}
            for name, (model, front_ends) in ways.items():
                speed = round(tokens_a_second(model, device, options.tokens, front_ends), 1)
                tell("decode", {"variant": name, "batch": 1, "tokens_a_second": speed})
    append(options.out, rows)


if __name__ == "__main__":
    main()
