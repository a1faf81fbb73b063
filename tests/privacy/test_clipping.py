"""Clipping: a record's contribution to a sum is within the clipping norm, whatever its entries are."""

from __future__ import annotations

import math

import pytest
import torch

from sfumato.privacy.clipping import Groups, Piece, clip, clipped_sum, matrix_precision

EXTREME = [0.0, 1e-45, 1e-30, 1e-3, 1.0, 1e3, 1e12, 1e19, 1e30, 3e38, math.inf, -math.inf, math.nan]


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def product(piece: Piece) -> torch.Tensor:
    """Return a piece of all records as [records, entries] in float64."""
    if isinstance(piece, tuple):
        return (piece[0][0].double().mT @ piece[1][0].double()).flatten(1)
    return piece[0].double().reshape(piece.shape[1], -1)


# -- rows -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("nonnegative", [False, True])
@pytest.mark.parametrize("kind", [torch.float32, torch.float64])
def test_all_rows_are_within_the_bound(nonnegative: bool, kind: torch.dtype) -> None:
    rows = torch.cat([numbers(20, 7, seed=seed).to(kind) * scale for seed, scale in enumerate(EXTREME)])
    rows[::5, 3] = math.nan
    rows[1::5, 2] = 1e30
    for bound, unit in ((1.0, 1.0), (0.7, 1e-6), (1e-9, 1.0), (1e9, 1e3)):
        clipped = clip(rows, bound, unit, nonnegative)
        assert clipped.dtype == torch.float64
        assert clipped.isfinite().all()
        assert float(clipped.norm(dim=1).max()) <= bound / unit * (1 + 1e-12)
        assert not nonnegative or (clipped >= 0).all()


def test_short_rows_are_unchanged_and_long_rows_keep_their_direction() -> None:
    rows = torch.tensor([[0.3, -0.4], [3.0, -4.0], [0.0, 0.0]])
    expected = torch.tensor([[0.3, -0.4], [0.6, -0.8], [0.0, 0.0]]).double()
    assert torch.allclose(clip(rows, 1.0, 1.0, False), expected)
    assert torch.allclose(clip(rows, 1.0, 0.5, False), 2 * expected)
    assert torch.allclose(clip(rows, 1.0, 1.0, True)[1], torch.tensor([1.0, 0.0]).double())
    assert torch.equal(rows[1], torch.tensor([3.0, -4.0]))  # the input is not modified


def test_each_row_is_clipped_independently() -> None:
    rows = numbers(9, 5) * 3
    for at in range(9):
        other = rows.clone()
        other[at] = math.nan
        changed = (clip(rows, 1.0, 1.0, False) != clip(other, 1.0, 1.0, False)).any(1)
        assert changed.nonzero().flatten().tolist() == [at]


# -- pieces -----------------------------------------------------------------------------------------------


def some_pieces(records: int = 6, scale: float = 1.0) -> list[Piece]:
    """Return a tensor, a scalar, a product that is multiplied out, and two factored products (one term, two terms)."""
    return [
        scale * numbers(1, records, 3, 4),
        scale * numbers(1, records, seed=1),
        (scale * numbers(1, records, 8, 3, seed=2), numbers(1, records, 8, 5, seed=3)),
        (scale * numbers(1, records, 1, 30, seed=4), numbers(1, records, 1, 40, seed=5)),
        (scale * numbers(1, records, 2, 40, seed=6), numbers(1, records, 2, 50, seed=7)),
    ]


GROUPS: Groups = [(0.5, [0, 3]), (2.0, [1, 2, 4])]


def test_the_sum_is_the_sum_of_clipped_vectors() -> None:
    pieces, weights = some_pieces(), torch.tensor([[1.0, 0.5, 0.0, 1.0, 0.25, 1.0]], dtype=torch.float64)
    vectors = [product(piece) for piece in pieces]
    expected = [torch.zeros(each.shape[1], dtype=torch.float64) for each in vectors]
    for bound, indices in GROUPS:
        norms = torch.stack([vectors[index].square().sum(1) for index in indices]).sum(0).sqrt()
        for index in indices:
            expected[index] = (vectors[index] * (bound / norms.clamp_min(bound) * weights[0])[:, None]).sum(0)
    found = clipped_sum(pieces, GROUPS, weights)
    assert found.dtype == torch.float32
    assert torch.allclose(found[0].double(), torch.cat(expected), rtol=1e-4, atol=1e-5)


def test_lanes_are_summed_separately() -> None:
    pieces: list[Piece] = [numbers(3, 4, 5), (numbers(3, 4, 1, 30), numbers(3, 4, 1, 40, seed=1))]
    weights = torch.rand(3, 4, dtype=torch.float64)
    together = clipped_sum(pieces, [(1.0, [0, 1])], weights)
    for lane in range(3):
        own = [tuple(f[lane : lane + 1] for f in p) if isinstance(p, tuple) else p[lane : lane + 1] for p in pieces]
        assert torch.allclose(together[lane], clipped_sum(own, [(1.0, [0, 1])], weights[lane : lane + 1])[0], atol=1e-6)


def contribution_norm(pieces: list[Piece], groups: Groups, record: int) -> float:
    weights = torch.zeros(1, len(product(pieces[0])), dtype=torch.float64)
    weights[0, record] = 1
    found = clipped_sum(pieces, groups, weights)
    assert found.isfinite().all()
    return float(found.double().norm())


@pytest.mark.parametrize("left", EXTREME)
@pytest.mark.parametrize("right", EXTREME)
def test_a_record_adds_at_most_its_bounds(left: float, right: float) -> None:
    """Entries of any magnitude, in tensors and in both factors; non-finite entries add zero."""
    pieces: list[Piece] = [
        (piece[0] * left, piece[1] * right) if isinstance(piece, tuple) else piece * left for piece in some_pieces(4)
    ]
    total_bound = math.hypot(*(bound for bound, _ in GROUPS))
    for record in range(4):
        assert contribution_norm(pieces, GROUPS, record) <= total_bound * (1 + 1e-4)


def test_a_nonfinite_record_adds_zero_and_does_not_affect_others() -> None:
    weights = torch.ones(1, 6, dtype=torch.float64)
    for bad in (math.nan, math.inf, -math.inf):
        for index in range(5):
            pieces, rest = some_pieces(), weights.clone()
            rest[0, 2] = 0
            expected = clipped_sum(pieces, GROUPS, rest)
            spoiled = pieces[index]
            (spoiled[1] if isinstance(spoiled, tuple) else spoiled)[0, 2] = bad
            assert torch.allclose(clipped_sum(pieces, GROUPS, weights), expected, atol=1e-6)


@pytest.mark.parametrize("views", [1, 4])
@pytest.mark.parametrize("sides", [(6, 5), (40, 50), (200, 300)])
def test_norms_are_correct_where_terms_cancel(views: int, sides: tuple[int, int]) -> None:
    """A gradient that is a small difference of huge products is still clipped to the bound."""
    p, d = sides
    left, right = numbers(1, 7, 1, p) * 1e6, numbers(1, 7, 1, d, seed=1) * 1e6
    small = numbers(1, 7, views, p, seed=2)
    pieces: list[Piece] = [
        (
            torch.cat([left, -left + small[:, :, :1], small], 2),
            torch.cat([right, right, numbers(1, 7, views, d, seed=3)], 2),
        )
    ]
    for record in range(7):
        assert contribution_norm(pieces, [(1.0, [0])], record) <= 1.001


def test_terms_that_cancel_completely() -> None:
    left, right = numbers(1, 3, 1, 100) * 1e9, numbers(1, 3, 1, 100, seed=1) * 1e9
    pieces: list[Piece] = [(torch.cat([left, -left], 2), torch.cat([right, right], 2))]
    for record in range(3):
        assert contribution_norm(pieces, [(1.0, [0])], record) <= 1.001


def test_norms_of_long_gradients_are_accurate() -> None:
    each = torch.full((1, 1, 4_000_000), 0.1)
    found = clipped_sum([each], [(1.0, [0])], torch.ones(1, 1, dtype=torch.float64))
    assert float(found.double().norm()) == pytest.approx(1, rel=1e-5)


def test_bfloat16_factors_are_clipped_correctly() -> None:
    pieces: list[Piece] = [
        (numbers(1, 4, 8, 3).bfloat16() * 100, numbers(1, 4, 8, 5, seed=1).bfloat16()),
        (numbers(1, 4, 1, 30).bfloat16() * 100, numbers(1, 4, 1, 40, seed=1).bfloat16()),
    ]
    for record in range(4):
        assert 0.99 < contribution_norm(pieces, [(1.0, [0, 1])], record) <= 1.0001


def test_sums_ignore_autocast() -> None:
    weights = torch.ones(1, 2100, dtype=torch.float64)
    pieces: list[Piece] = [1 + 0.01 * numbers(1, 2100, 32)]
    with torch.autocast("cpu", torch.bfloat16):
        found = clipped_sum(pieces, [(1.0, [0])], weights)
        weights[0, 0] = 0
        less = clipped_sum(pieces, [(1.0, [0])], weights)
    assert float((found - less).double().norm()) == pytest.approx(1, rel=1e-2)


def test_matrix_precision_is_set_and_restored() -> None:
    matmul = torch.backends.cuda.matmul
    try:
        for choose in (
            lambda: torch.set_float32_matmul_precision("high"),
            lambda: setattr(matmul, "fp32_precision", "tf32"),
        ):
            choose()
            assert matmul.fp32_precision == "tf32"
            with matrix_precision("ieee"):
                assert matmul.fp32_precision == "ieee"
            assert matmul.fp32_precision == "tf32"
            with pytest.raises(KeyError), matrix_precision("ieee"):
                raise KeyError
            assert matmul.fp32_precision == "tf32"
            torch.set_float32_matmul_precision("highest")
    finally:
        matmul.fp32_precision = "none"
        torch.set_float32_matmul_precision("highest")


def test_each_piece_must_be_in_exactly_one_group() -> None:
    pieces, weights = some_pieces(), torch.ones(1, 6, dtype=torch.float64)
    for groups in ([(1.0, [0, 1, 2, 3])], [(1.0, [0, 1, 2, 3, 4]), (1.0, [4])], [(1.0, [0, 1, 2, 3, 4, 5])]):
        with pytest.raises(ValueError, match="exactly one group"):
            clipped_sum(pieces, groups, weights)
