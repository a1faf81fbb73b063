"""What a ledger has spent so far."""

from __future__ import annotations

import math

import pytest

from sfumato.certificate.spending import SpendingText, spending
from sfumato.data import ImageSet
from sfumato.methods.registry import create
from sfumato.privacy import Budget, Ledger, Plan, Release
from sfumato.privacy.accounting import bounds, tightest
from sfumato.privacy.vault import Vault


def opened(images: ImageSet, *releases: Release, epsilon: float = 8.0) -> tuple[Ledger, Vault]:
    ledger = Ledger()
    facts = {"method": "x", "parameters": {}, "public_facts": {}}
    return ledger, Vault(images, Plan(releases, Budget(epsilon)), ledger=ledger, facts=facts)


def test_spending_grows_with_the_charges(few_digits):
    first, second = Release("counts", noise_multiplier=4.0), Release("more", noise_multiplier=2.0)
    ledger, vault = opened(few_digits, first, second)
    assert spending(ledger.entries).epsilon == 0
    assert str(spending(ledger.entries)) == "ε 0 of 8 spent"
    vault.counts()
    found = spending(ledger.entries)
    assert found.epsilon == pytest.approx(tightest(bounds([first], 1e-5)), rel=1e-6)
    assert found.charged == {"counts": (1, 1), "more": (0, 1)}
    vault.counts(release="more")
    assert spending(ledger.entries).epsilon == pytest.approx(tightest(bounds([first, second], 1e-5)), rel=1e-6)


def test_a_bound_for_sampled_releases_is_never_above_the_budget(few_digits):
    steps = Release("steps", times=100, sampling_prob=0.1, noise_multiplier=2.0)
    epsilon = tightest(bounds([steps], 1e-5))
    ledger, vault = opened(few_digits, steps, epsilon=epsilon)
    for _ in range(3):
        vault.sum(lambda x: x.flatten(1), release="steps", bound=1.0)
    charged = spending(ledger.entries).charged["steps"][0]
    part = tightest(bounds([Release("steps", charged, 0.1, 2.0)], 1e-5))
    assert part <= spending(ledger.entries).epsilon <= epsilon
    assert spending(ledger.entries).charged["steps"] == (charged, 100)


def test_nothing_and_no_guarantee(few_digits):
    assert spending([]).charged == {}
    ledger, vault = opened(few_digits, Release("counts", noise_multiplier=4.0))
    vault.unprotected("a test")
    assert spending(ledger.entries).epsilon == math.inf
    assert str(spending(ledger.entries)) == "no guarantee"


def test_text_is_computed_for_new_lines_only(few_digits, monkeypatch):
    ledger, vault = opened(few_digits, Release("counts", noise_multiplier=4.0))
    text = SpendingText(ledger.entries)
    assert text() == "ε 0 of 8 spent"
    monkeypatch.setattr("sfumato.certificate.spending.spending", lambda entries: f"{len(entries)} lines")
    assert text() == "ε 0 of 8 spent"
    vault.counts()
    assert text() == "2 lines"


def test_a_fit_shows_what_it_spends(few_digits, monkeypatch):
    shown = []
    monkeypatch.setattr("sfumato.methods.base.show_spending", shown.append)
    create("dp-merf", epsilon=2.0, steps=2, features=20, device="cpu").fit(few_digits)
    assert shown[0]() == "ε 2 of 2 spent"
