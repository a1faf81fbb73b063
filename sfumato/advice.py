"""Warn about settings that give a formally valid but weak guarantee, before any privacy budget is spent.

The warnings of `warnings_for` depend only on public facts and the budget, never on images or on sizes that were not
declared public. Those of `private_warnings_for` are for the owner's terminal only.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

from sfumato.data import ImageSet, PublicFacts
from sfumato.data.errors import first_few
from sfumato.methods.base import Synthesizer
from sfumato.privacy.budget import Budget

MAX_EPSILON = 20
MAX_DELTA = 1e-3
MIN_UNITS, MIN_UNITS_PER_CLASS = 100, 20
MIN_UNITS_TIMES_EPSILON = 100  # units of a class times epsilon; the digits have 140 at epsilon 1: just readable
MAX_CLASSES = 100
MIN_PATTERN_CLASSES = 5  # fewer class names are not a pattern

# Given names from many countries, without names that are also common words for things, animals, plants or diseases.
GIVEN_NAMES_TEXT = """
    aaron abdul adam ahmed aisha akira alan albert alejandro aleksandr alessandro alex alexander alexandra alfred ali
    alice alina amanda amelie amina amir ana anastasia anders andre andrea andreas andrew andrzej angela anita anja ann
    anna anne annika anthony antonio arjun arthur astrid ayse barbara beatriz ben benjamin bernd bettina birgit bjorn
    bogdan brian bruno camille carina carl carla carlos carmen carol caroline catherine cecilia charles charlotte chen
    chiara chloe chris christian christina christine christopher claire clara claudia cornelia cristina dagmar daniel
    daniela dariusz david deborah deepak denis diana diego dieter dimitri dmitri dominik donald doris dorothy edith
    eduardo edward elena eleni elias elisabeth elizabeth ella ellen elsa emil emily emine emma eric erik ernst esther
    ethan eugene eva fatima fatma felix fernando filip florian francesco francois frank franz frederik friedrich
    gabriel gabriela george gerald gerhard giovanni giulia gregor gudrun guido gunter gustav hanna hannah hans harald
    hassan heidi heike heinrich helen helena helga helmut henri henrik henry herbert hiroshi holger hugo ian ibrahim
    igor ines inge ingrid irene irina isabel isabella ivan jacob jakob jakub james jan jane janina jean jens jessica
    joachim joan joanna johan johanna john jonas jorge jose josef joseph juan julia julian julie jun jung karen karin
    karl katarina katharina kathrin katja kenji kevin khaled kim klaus konrad kristina kumar kurt lars laszlo laura
    lea lena leon leonie li lin linda lisa lorenzo louis louise luca lucas lucia luis lukas luke magdalena maja manfred
    manuel marc marcel marco marcus margaret maria mariam marie marina mario marion mark markus marta martha martin
    martina mary maryam mateo matthew matthias maximilian mehmet mei melanie mia michael michal michelle miguel mike
    mikhail mila milan mohamed mohammad mohammed monika moritz muhammad mustafa nadia nadine nancy natalia natasha
    nicolas nicole niklas nikolai nils nina noah nora nuria olaf oleg olga oliver olivia omar oscar otto pablo paolo
    patricia patrick paul paula pavel pedro peter petra philip philipp pierre piotr priya rachel rafael rahul rainer
    ralf raj ramon rebecca regina renate ricardo richard rita robert roberto roland ronald rosa ruth sabine salma
    samantha samir samuel sandra sara sarah sebastian sergei sergio silke silvia simon sofia sonja sophia sophie stefan
    stefanie stephanie stephen steven sunil susan susanne svetlana sven takashi tanja tariq tatiana teresa theodor
    theresa thomas thorsten tim timo tobias tom tomasz torsten udo ulrich ulrike ursula ute uwe valentina vera
    veronika victor victoria viktor vincent vladimir volker walter wei werner wilhelm william wolfgang xavier xiao
    yasmin yuki yusuf yves zeynep
"""
GIVEN_NAMES = frozenset(GIVEN_NAMES_TEXT.split())
WORD_SEPARATOR = re.compile(r"[\s_,.-]+")
CAPITALISED = re.compile(r"[^\W\d_]['’]?[^\W\d_]*")
IDENTIFIER = re.compile(
    r"\d{5,}|(?!n\d{8}$)[A-Za-z]{1,4}[-_ ]?\d{4,}|\d{4,}[-_ ]?[A-Za-z]{1,2}"
)  # except n01440764, a WordNet synset
NUMBERED_PERSON = re.compile(
    r"(patient|pat|person|proband|subject|subj|sub|user|client|case|id)[-_ #]*\d+", re.IGNORECASE
)
PUBLIC_CODE = re.compile(r"n\d{8}|\d{1,4}")


def advice(model: Synthesizer, images: ImageSet) -> tuple[list[str], list[str]]:
    """Return the warnings about a run: those for everybody, and those for the owner's eyes."""
    public = model.public_facts(images)
    budget = Budget(model.epsilon, model.delta, model.adjacency, public.unit)
    return warnings_for(public, budget), private_warnings_for(images, model.epsilon, model.delta)


def warnings_for(public: PublicFacts, budget: Budget) -> list[str]:
    """Return the warnings, one line each: what is weak, why, and what to do."""
    return [
        *_budget_warnings(public, budget),
        *_size_warnings(public),
        *_class_name_warnings(public.classes, public.sizes is None),
    ]


def private_warnings_for(images: ImageSet, epsilon: float, delta: float) -> list[str]:
    """Return warnings that depend on the private number of units: for the owner's terminal, never to be stored."""
    public = images.public(declare_size=True)
    sizes = public.sizes or ()
    units, unit, found = sum(sizes), public.unit, []
    if delta * units > 1 and delta < MAX_DELTA:  # a larger one is reported for every set
        found.append(f"delta {delta:g} is above 1 / number of {unit}s of this set; choose {0.01 / units:.0e} or less")
    if math.isfinite(epsilon) and units >= MIN_UNITS and min(sizes) * epsilon < MIN_UNITS_TIMES_EPSILON:
        found.append(
            f"few {unit}s for epsilon {epsilon:g}: the smallest class will hardly show through the noise; "
            f"collect more, merge classes, or choose a larger epsilon"
        )
    return found


def _budget_warnings(public: PublicFacts, budget: Budget) -> list[str]:
    found = []
    unit, units = budget.unit, sum(public.sizes) if public.sizes is not None else None
    if not budget.private:
        found.append("epsilon is inf, so no noise is added and nothing is protected; do not share the result")
    elif budget.epsilon > MAX_EPSILON:
        found.append(
            f"epsilon {budget.epsilon:g} gives almost no protection: the odds of a guess about one {unit} can grow by "
            f"a factor of e^{budget.epsilon:g}; choose at most 10, better 1"
        )
    if budget.delta >= MAX_DELTA or (units is not None and budget.delta * units > 0.5):
        found.append(
            f"delta {budget.delta:g} is not far below 1/n, so the guarantee would allow publishing a few {unit}s; "
            f"choose {f'at most {0.01 / max(units, 1):.0e}' if units else '1e-5 or less'}"
        )
    return found


def _size_warnings(public: PublicFacts) -> list[str]:
    if public.sizes is None:
        return []
    found, unit = [], public.unit
    if sum(public.sizes) < MIN_UNITS:
        found.append(f"fewer than {MIN_UNITS} {unit}s in total: the noise dominates in so small a set; collect more")
    small = [name for name, size in zip(public.classes, public.sizes, strict=True) if size < MIN_UNITS_PER_CLASS]
    if small:
        found.append(
            f"fewer than {MIN_UNITS_PER_CLASS} {unit}s in {first_few(small)}: the noise dominates in so small a class; "
            "merge classes, or leave this class out"
        )
    return found


def _class_name_warnings(classes: Sequence[str], sizes_unknown: bool) -> list[str]:
    published = "class names are published in the certificate and as folder names, and are not protected"
    if persons := _names_like_persons(classes):
        return [
            f"classes look like persons or identifiers ({first_few(persons)}): {published}; if they are persons, use "
            "--person with other classes, or --unlabelled"
        ]
    if sizes_unknown and len(classes) > MAX_CLASSES and not all(PUBLIC_CODE.fullmatch(name) for name in classes):
        return [f"{len(classes)} classes: {published}; make sure that no name identifies a person"]
    return []


def _names_like_persons(classes: Sequence[str]) -> list[str]:
    """Return the class names that look like persons, if they are at least five and more than half."""
    words = {name: [word for word in WORD_SEPARATOR.split(name) if word] for name in classes}
    given = [name for name in classes if any(word.lower() in GIVEN_NAMES for word in words[name])]
    full_names = [name for name in classes if _is_full_name(words[name])]
    numbers = [name for name in classes if IDENTIFIER.fullmatch(name) or NUMBERED_PERSON.fullmatch(name)]
    threshold = max(MIN_PATTERN_CLASSES, len(classes) // 2 + 1)
    # A fifth must contain a given name: "Basal Cell Carcinoma" is capitalised, but not a person.
    if len(full_names) >= threshold and 5 * len(set(full_names) & set(given)) >= len(full_names):
        return full_names
    return next((found for found in (given, numbers) if len(found) >= threshold), [])


def _is_full_name(words: list[str]) -> bool:
    return 2 <= len(words) <= 3 and all(CAPITALISED.fullmatch(word) and word[0].isupper() for word in words)
