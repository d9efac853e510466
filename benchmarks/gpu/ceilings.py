"""Upper bounds of the device: speeds of plain matrix products and of plain copies."""

import torch

from gpu.common import Emit, Settings, peak_flops, seconds_of


def run(emit: Emit, settings: Settings) -> None:
    size, length = (256, 1 << 20) if settings.small else (8192, 1 << 32)
    a, b = (torch.randn(size, size, device=settings.device, dtype=settings.dtype) for _ in range(2))
    out = torch.empty_like(a)
    seconds = seconds_of(lambda: torch.mm(a, b, out=out), settings.device, 10, warm=3)[0]
    flops = 2 * size**3 / seconds
    known = peak_flops()
    emit(
        f"matrix product, {size} x {size} x {size}",
        tflops=flops / 1e12,
        peak_share=flops / known[0] if known else None,
        peak=known[1] if known else "not known for this device",
    )
    source = torch.empty(length, dtype=torch.uint8, device=settings.device).fill_(1)
    target = torch.empty_like(source)
    seconds = seconds_of(lambda: target.copy_(source), settings.device, 10, warm=2)[0]
    emit(f"copy on the device, {length / 1e9:.2f} GB", read_and_written_gb_per_s=2 * length / seconds / 1e9)
    if settings.cuda:
        host = torch.empty(1 << 30, dtype=torch.uint8, pin_memory=True)
        seconds = seconds_of(lambda: host.copy_(source[: 1 << 30]), settings.device, 5)[0]
        emit("copy to the host's pinned memory, 1.07 GB", gb_per_s=(1 << 30) / seconds / 1e9)
