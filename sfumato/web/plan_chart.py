"""Draw the plan of a run as a chart: what is released, at which noise, and the success of the best attack."""

from __future__ import annotations

import math
from typing import Any

from markupsafe import Markup

from sfumato.preview import Preview
from sfumato.report.guarantee import attack_success, curve_of, shares_of

WIDTH, ROW, TOP = 480, 56, 28
SHARE, SECOND, NOISE = 190, 265, 150  # width of the first bar, start and width of the second
LOW_NOISE, HIGH_NOISE = 0.1, 10_000.0  # ends of the scale


def describe(found: Preview) -> dict[str, Any]:
    """Return what the page shows of a preview."""
    public, plan = found.public, found.plan
    budget = plan.budget
    channels, height, width = public.shape
    success = attack_success(curve_of(plan.releases, budget.adjacency, plan.epsilon, budget.delta))
    return {
        "preview": found,
        "facts": [
            ("Method", found.method),
            ("Prior", found.prior or "none"),
            ("Images", f"{width} × {height} pixels, {'grey' if channels == 1 else 'RGB'}"),
            ("Classes", _classes(found)),
            ("Protected unit", f"one {public.unit}"),
            ("Number declared public", "no" if public.sizes is None else f"{sum(public.sizes):g} {public.unit}s"),
            ("Total", f"ε {plan.epsilon:.4g} at δ {budget.delta:g}, {budget.adjacency}"),
        ],
        "success": success,
        "percent": percent(success),
        "chart": chart(found),
        "gauge": gauge(success),
    }


def chart(found: Preview) -> Markup:
    """Draw one row for each release: its share of the budget, and its noise on a logarithmic scale."""
    plan, rows, told = found.plan, [], []
    shares = shares_of(plan.releases, plan.budget.adjacency, plan.budget.delta)
    for number, (release, share) in enumerate(zip(plan.releases, shares, strict=True)):
        y = TOP + number * ROW
        times = f"{release.times:,} times" if release.times > 1 else "once"
        sampled = "" if release.sampling_prob == 1 else f", each on {release.sampling_prob:.2g} of the images"
        noise = math.log(release.noise / LOW_NOISE) / math.log(HIGH_NOISE / LOW_NOISE)
        name = Markup('<tspan class="name">{}</tspan> <tspan class="soft">{}{}</tspan>').format(
            release.name, times, sampled
        )
        rows.append(_text(0, y + 16, name, "name"))
        rows.append(_bar(0, y + 22, SHARE * share, "share", f"{100 * share:.0f} %"))
        rows.append(_bar(SECOND, y + 22, NOISE * min(max(noise, 0.01), 1), "noise", f"{release.noise:.3g}"))
        told.append(f"{release.name}: {100 * share:.0f} % of the budget, noise multiplier {release.noise:.3g}")
    height, label = TOP + ROW * len(plan.releases), f"Releases. {'; '.join(told)}"
    start = Markup('<svg viewBox="0 0 {} {}" role="img" aria-label="{}">').format(WIDTH, height, label)
    heads = _text(0, 14, "share of the budget", "soft") + _text(SECOND, 14, "noise multiplier", "soft")
    return start + heads + Markup("").join(rows) + Markup("</svg>")


def gauge(success: float) -> Markup:
    """Draw how often an attacker guesses a coin right, between blind guessing and certainty."""
    place = 10 + (WIDTH - 20) * min(max(2 * success - 1, 0.0), 1.0)
    told = f"An attacker guesses right at most {percent(success)} of the time; blind guessing gives 50 %"
    return Markup(
        '<svg viewBox="0 0 {0} 64" role="img" aria-label="{1}">'
        '<rect x="10" y="26" width="{2}" height="10" rx="5" class="rail"/>'
        '<rect x="10" y="26" width="{3:.1f}" height="10" rx="5" class="share"/>'
        '<circle cx="{4:.1f}" cy="31" r="9" class="dot"/>'
        '<text x="0" y="58" class="soft">50 %, blind guess</text>'
        '<text x="{0}" y="58" text-anchor="end" class="soft">100 %, certainty</text>'
        '<text x="{5:.1f}" y="16" text-anchor="middle" class="name">{6}</text></svg>'
    ).format(WIDTH, told, WIDTH - 20, place - 10, place, min(max(place, 30), WIDTH - 30), percent(success))


def percent(share: float) -> str:
    """Return a share in percent, rounded up: what is promised is never understated."""
    return f"{math.ceil(1000 * share - 1e-9) / 10:.1f} %"


def _classes(found: Preview) -> str:
    public = found.public
    if not public.labelled:
        return "none"
    names = ", ".join(public.classes[:8]) + (", …" if len(public.classes) > 8 else "")
    return f"{len(public.classes)} ({names})"


def _bar(x: float, y: float, width: float, kind: str, text: str) -> Markup:
    rect = Markup('<rect x="{}" y="{}" width="{:.1f}" height="18" rx="3" class="{}"/>').format(
        x, y, max(width, 2.0), kind
    )
    return rect + _text(x + max(width, 2.0) + 6, y + 14, text, "value")


def _text(x: float, y: float, text: str, kind: str) -> Markup:
    return Markup('<text x="{:.1f}" y="{:.1f}" class="{}">{}</text>').format(x, y, kind, text)
