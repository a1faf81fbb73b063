"""Warnings before anything is spent: settings that keep the letter of the guarantee and not its purpose.

All of them come from public facts and the budget; none looks at an image or at a size that was not declared public.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from sfumato.data import PublicFacts
from sfumato.privacy.budget import Budget

MOST_EPSILON = 20
MOST_DELTA = 1e-3
FEW, FEW_IN_CLASS = 100, 20
MANY_CLASSES = 100
NAMED = 5  # classes at least, before their names count as a pattern

# Given names from many countries; none is also a common word for a thing or a kind of animal, plant or disease.
NAMES = """
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
GIVEN_NAMES = frozenset(NAMES.split())
WORDS = re.compile(r"[\s_,.-]+")
CAPITALISED = re.compile(r"[^\W\d_]['’]?[^\W\d_]*")
IDENTIFIER = re.compile(r"\d{5,}|(?!n\d{8}$)[A-Za-z]{1,4}[-_ ]?\d{4,}|\d{4,}[-_ ]?[A-Za-z]{1,2}")  # n01440764: a synset
NUMBERED = re.compile(r"(patient|pat|person|proband|subject|subj|sub|user|client|case|id)[-_ #]*\d+", re.IGNORECASE)
PUBLIC_NAME = re.compile(r"n\d{8}|\d{1,4}")


def warnings_for(public: PublicFacts, budget: Budget) -> list[str]:
    """Say what looks unwise, one line each: what, why, what to do."""
    return [*_of_budget(public, budget), *_of_sizes(public), *_of_names(public.classes, public.sizes is None)]


def _of_budget(public: PublicFacts, budget: Budget) -> list[str]:
    found = []
    unit, units = budget.unit, sum(public.sizes) if public.sizes is not None else None
    if not budget.private:
        found.append("epsilon is inf: no noise is added and nothing is protected; do not share the result")
    elif budget.epsilon > MOST_EPSILON:
        found.append(
            f"epsilon {budget.epsilon:g} promises next to nothing: the odds of a guess about one {unit} may grow by a "
            f"factor of e^{budget.epsilon:g}; choose at most 10, better 1"
        )
    if budget.delta >= MOST_DELTA or (units is not None and budget.delta * units > 0.5):
        found.append(
            f"delta {budget.delta:g} is not far below 1/n: publishing a few {unit}s outright would be allowed; "
            f"choose {f'at most {0.01 / max(units, 1):.0e}' if units else '1e-5 or less'}"
        )
    return found


def _of_sizes(public: PublicFacts) -> list[str]:
    if public.sizes is None:
        return []
    found, unit = [], public.unit
    if sum(public.sizes) < FEW:
        found.append(f"fewer than {FEW} {unit}s in all: noise that hides one of so few hides everything; collect more")
    small = [name for name, size in zip(public.classes, public.sizes, strict=True) if size < FEW_IN_CLASS]
    if small:
        found.append(
            f"fewer than {FEW_IN_CLASS} {unit}s in {_some(small)}: little but noise will be learned of so small a "
            "class; merge classes or leave it out"
        )
    return found


def _of_names(classes: Sequence[str], sizes_unknown: bool) -> list[str]:
    published = "class names are published, in the certificate and as folders of images, and are not protected"
    if like := _like_persons(classes):
        return [
            f"classes look like persons or identifiers ({_some(like)}): {published}; if they are, read the folders "
            "with --person and other classes, or --unlabelled"
        ]
    if sizes_unknown and len(classes) > MANY_CLASSES and not all(PUBLIC_NAME.fullmatch(name) for name in classes):
        return [f"{len(classes)} classes: {published}; make sure that no name tells of a person"]
    return []


def _like_persons(classes: Sequence[str]) -> list[str]:
    """The classes that look like persons, if they are more than half and not just a few."""
    words = {name: [word for word in WORDS.split(name) if word] for name in classes}
    known = [name for name in classes if any(word.lower() in GIVEN_NAMES for word in words[name])]
    pairs = [name for name in classes if _capitalised(words[name])]
    numbers = [name for name in classes if IDENTIFIER.fullmatch(name) or NUMBERED.fullmatch(name)]
    half = max(NAMED, len(classes) // 2 + 1)
    if len(pairs) >= half and 5 * len(set(pairs) & set(known)) >= len(pairs):  # "Basal Cell Carcinoma" is no person
        return pairs
    return next((found for found in (known, numbers) if len(found) >= half), [])


def _capitalised(words: list[str]) -> bool:
    return 2 <= len(words) <= 3 and all(CAPITALISED.fullmatch(word) and word[0].isupper() for word in words)


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
