"""tests/adapter.py: ./cs336 from PyTorch. Tensors go to it and come back in safetensors files.

  cs336("attention", {"inputs": {"q": q, "k": k, "v": v}}, "--causal")   -> {"o": ..., "lse": ...}
  Attention.apply(q, k, v, is_causal)                                    -> o, with a backward

The course's public attention tests run against ./cs336, too. Put these lines into the assignment's tests/adapters.py,
in place of its two functions:

  import sys
  sys.path.append("/where/you/cloned/it/tests")
  from adapter import get_flashattention_autograd_function_pytorch, get_flashattention_autograd_function_triton

The environment's CS336_BINARY names another program than the ./cs336 above this folder."""
import ctypes, json, os, subprocess, tempfile
import torch

HERE = os.path.dirname(os.path.abspath(__file__))
DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
          "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool}


def save(path, tensors):
    """A safetensors file: the header's length in 8 bytes, the header in JSON, then the tensors' bytes."""
    names = {dtype: name for name, dtype in DTYPES.items()}
    header, end = {}, 0
    tensors = {name: t.detach().cpu().contiguous() for name, t in tensors.items()}
    for name, t in tensors.items():
        start, end = end, end + t.nbytes
        header[name] = {"dtype": names[t.dtype], "shape": list(t.shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    with open(path, "wb") as f:
        f.write(len(text).to_bytes(8, "little") + text)
        for t in tensors.values():
            f.write(ctypes.string_at(t.data_ptr(), t.nbytes))


def load(path):
    with open(path, "rb") as f:
        data = bytearray(f.read())
    start = 8 + int.from_bytes(data[:8], "little")
    header, data = json.loads(data[8:start]), data[start:]
    header.pop("__metadata__", None)
    part = lambda t: torch.frombuffer(data[slice(*t["data_offsets"])] or bytearray(8), dtype=DTYPES[t["dtype"]])
    return {name: part(t)[:torch.Size(t["shape"]).numel()].view(t["shape"]) for name, t in header.items()}


def cs336(command, inputs, *options):
    """The tensors that `./cs336 COMMAND` writes. inputs: {name of an option that takes a file: tensors by name}."""
    program = os.environ.get("CS336_BINARY", os.path.join(HERE, "..", "cs336"))
    with tempfile.TemporaryDirectory() as folder:
        out = os.path.join(folder, "out.safetensors")
        words = [program, command, "--out", out, *map(str, options)]
        for option, tensors in inputs.items():
            words += ["--" + option, os.path.join(folder, option + ".safetensors")]
            save(words[-1], tensors)
        try:
            run = subprocess.run(words, capture_output=True, text=True)
        except OSError as e:
            raise RuntimeError(f"./cs336: {program}: {e.strerror}; type `make` first, or set CS336_BINARY")
        if run.returncode:
            raise RuntimeError(f"./cs336 {command}: {(run.stderr.strip() or 'failed').splitlines()[-1]}")
        return load(out)


class Attention(torch.autograd.Function):
    """FlashAttention-2's interface in the handout: q, k and v are [B, S, D] or [B, H, S, D]."""

    @staticmethod
    def run(causal, **tensors):
        wide = lambda t: t if t.dtype in (torch.float32, torch.bfloat16) else t.float()  # what ./cs336 attention takes
        options = ["--causal"] if causal else []
        return cs336("attention", {"inputs": {name: wide(t) for name, t in tensors.items()}}, *options)

    @staticmethod
    def forward(ctx, q, k, v, is_causal=False):
        out = Attention.run(is_causal, q=q, k=k, v=v)
        ctx.save_for_backward(q, k, v, out["lse"].to(q.device))  # the public tests look for the logsumexp here
        ctx.is_causal = is_causal
        return out["o"].to(q)

    @staticmethod
    def backward(ctx, do):
        q, k, v, _ = ctx.saved_tensors
        out = Attention.run(ctx.is_causal, q=q, k=k, v=v, do=do.to(q))  # it computes the forward once more
        return *(out[name].to(q) for name in ("dq", "dk", "dv")), None


def get_flashattention_autograd_function_pytorch():
    return Attention


def get_flashattention_autograd_function_triton():
    return Attention
