import torch

from sfumato.data.pixels import to_bytes, to_unit_range


def test_every_byte_survives_a_round_trip() -> None:
    stored = torch.arange(256, dtype=torch.uint8)
    scaled = to_unit_range(stored)
    assert scaled.dtype == torch.float32
    assert (scaled[0], scaled[-1]) == (-1, 1)
    assert torch.equal(to_bytes(scaled), stored)


def test_values_outside_the_range_are_clamped() -> None:
    assert to_bytes(torch.tensor([-3.0, -1.0, 0.0, 1.0, 3.0])).tolist() == [0, 0, 128, 255, 255]
