"""A real language model on the GPU: the same greedy tokens as on the CPU, and tokens a second.

    python benchmarks/model_on_gpu.py QUANTIZED [--source PLAIN] [--tokens 64] [--out FILE]

QUANTIZED is what ``hadaquant quantize`` wrote, its rotation and format as they are. Both runs compute in float32, so
that the linears' inputs differ between the devices only by the order of sums in attention and norms. Reported: how
many tokens agree, how far the logits are apart while the contexts agree, and at the first token that differs the
margin between the two candidates. Each linear is also given what it reads on the CPU: its coded input has to be the
same bytes, an INT8 output the same bits, an FP4 output within the bound of products: an error against the float64
product of at most twice torch's float32 one, and a float32 rounding. With ``--source``, the unquantized folder, the
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
from decoding import Decoder
from tokenizers import Tokenizer
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

import hadaquant as hq
from hadaquant.bench.record import append

OUT = Path(__file__).parent / "results" / "model.jsonl"
PROMPTS = (
    "The history of the steam engine begins",
    "To make bread you need flour, water,",
    "In mathematics, a Hadamard matrix is",
    "Once upon a time, in a small village by the sea,",
)


def greedy(model: PreTrainedModel, ids: Tensor, tokens: int) -> tuple[Tensor, Tensor]:
    """Greedy tokens [tokens] and their logits [tokens, vocabulary], on the CPU."""
    made = model.generate(
        ids.to(model.device),
        attention_mask=torch.ones_like(ids).to(model.device),
        max_new_tokens=tokens,
        min_new_tokens=tokens,
        do_sample=False,
        return_dict_in_generate=True,
        output_logits=True,
    )
    return made.sequences[0, ids.shape[1] :].cpu(), torch.cat(made.logits).float().cpu()


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


def linears(cpu: PreTrainedModel, gpu: PreTrainedModel, ids: Tensor) -> dict[str, object]:
    """Every linear of the GPU's model on what the CPU's reads for one prompt."""
    inputs: dict[str, Tensor] = {}

    def keep(name: str) -> Callable[..., None]:
        return lambda _, arguments: inputs.update({name: arguments[0].detach()})

    ours = {name: m for name, m in cpu.named_modules() if isinstance(m, hq.RotatedLinear)}
    hooks = [m.register_forward_pre_hook(keep(name)) for name, m in ours.items()]
    cpu(ids)
    for hook in hooks:
        hook.remove()
    row: dict[str, object] = {"layers": len(ours), "differing_inputs": 0, "differing_outputs": 0, "share_of_bound": 0.0}
    for name, layer in ours.items():
        there, x = gpu.get_submodule(name), inputs[name]
        coded = [hq.quantize(t, layer.format, rotation=layer.rotation) for t in (x, x.to(there.codes.device))]
        row["differing_inputs"] += sum(  # pyright: ignore[reportOperatorIssue]
            int((a != b.cpu()).sum())
            for a, b in zip(*((q.codes, q.scales.view(torch.uint8)) for q in coded), strict=True)
        )
        y, here = there(x.to(there.codes.device)).cpu(), layer(x)
        row["differing_outputs"] += int((y != here).sum())  # pyright: ignore[reportOperatorIssue]
        values, weight = coded[0].dequantize(), layer.dequantized_weight()
        exact, torchs = values.double() @ weight.double().T, values @ weight.T
        if layer.bias is not None:
            exact, torchs = exact + layer.bias.double(), torchs + layer.bias
        error, allowed = ((t.double() - exact).norm().item() for t in (y, torchs))
        share = error / (2 * allowed + 2.0**-22 * exact.norm().item())
        row["share_of_bound"] = max(row["share_of_bound"], share)  # pyright: ignore[reportArgumentType]
    return row


def tokens_a_second(model: PreTrainedModel, device: torch.device, tokens: int, front_ends: bool) -> float:
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
    cpu, gpu = (hq.load(options.quantized, device=d, dtype=torch.float32) for d in ("cpu", device))
    layer = next(m for m in gpu.modules() if isinstance(m, hq.RotatedLinear))
    what = {"model": options.quantized.name, "format": layer.format.name, "rotation": str(layer.rotation)}
    rows: list[dict[str, object]] = []
    with torch.inference_mode():
        for prompt in PROMPTS[: options.prompts]:
            ids = torch.tensor([tokenizer.encode(prompt).ids])
            start = time.perf_counter()
            here, there = greedy(cpu, ids, options.tokens), greedy(gpu, ids, options.tokens)
            row = {"what": "greedy", **what, **compare(prompt, here, there)}
            print(json.dumps(row), f"{time.perf_counter() - start:.1f} s", flush=True)
            rows.append(row)
        ids = torch.tensor([tokenizer.encode(PROMPTS[0]).ids])
        rows.append({"what": "linears", **what, **linears(cpu, gpu, ids)})
        print(json.dumps(rows[-1]), flush=True)
        if options.source is not None:
            plain = AutoModelForCausalLM.from_pretrained(options.source, dtype=torch.bfloat16).to(device).eval()
            name, ours = layer.format.name, gpu.to(torch.bfloat16)
            ways = {"bfloat16": (plain, False), name: (ours, False), f"{name}, front ends": (ours, True)}
            for name, (model, front_ends) in ways.items():
                speed = tokens_a_second(model, device, options.tokens, front_ends)
                rows.append({"what": "decode", **what, "variant": name, "batch": 1, "tokens_a_second": round(speed, 1)})
                print(json.dumps(rows[-1]), flush=True)
    append(options.out, rows)


if __name__ == "__main__":
    main()
