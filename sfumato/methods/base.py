"""What every method is: an estimator that sees private images only through a vault."""

from __future__ import annotations

import difflib
import json
import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from safetensors.torch import load_file, save_file

from sfumato.account import Account
from sfumato.certificate import Certificate, signing
from sfumato.data import DataError, ImageSet, PublicFacts
from sfumato.data.atomic import replacing
from sfumato.engine import Performance, Vault, calibrate
from sfumato.keeping import Kept
from sfumato.methods.checkpoints import Checkpoints, remove_checkpoint
from sfumato.privacy import Budget, BudgetExceeded, Ledger, Plan, Release
from sfumato.privacy.budget import Adjacency, Unit
from sfumato.privacy.vault import MAX_PER_PERSON

FORMAT = "sfumato-model/1"
SETTLED = frozenset({"epsilon", "delta", "adjacency", "public_size", "secure", "seed", "device"})  # by the user alone


class NotFittedError(ValueError):
    """The model was asked for something that it learns in `fit`."""


@dataclass(kw_only=True, eq=False)
class Synthesizer(ABC):
    """A method: parameters in the constructor, `fit` on private images, then `sample` for ever.

    A subclass states its releases in `_releases` (from public facts alone), learns in `_fit` from what the vault
    gives it, and draws images in `_sample`. What it has learned it hands to `_state` and takes back in `_restore`.
    """

    key: ClassVar[str]
    paper: ClassVar[str]
    summary: ClassVar[str]
    guarantee: ClassVar[str] = "differential-privacy"
    claimed: ClassVar[dict[str, Any] | None] = None
    may_be_zero: ClassVar[frozenset[str]] = frozenset({"seed"})
    adjustable: ClassVar[frozenset[str]] = frozenset()  # parameters of samples and scores alone: free after `fit`
    sample_batch: ClassVar[int] = 1000  # labels in one call of `_sample`
    on_cpu: ClassVar[dict[str, Any]] = {}  # what `create` takes in place of defaults that want a GPU
    suited: ClassVar[
        dict[tuple[str, Any], dict[str, Any]]
    ] = {}  # and where a parameter has that value; earlier ones win
    vault_type: ClassVar[type[Vault]] = Vault  # so that `check_synthesizer` can listen in

    epsilon: float = 1.0
    delta: float = 1e-5
    adjacency: Adjacency = "add-remove"
    public_size: bool = False
    secure: bool = True
    device: str = "auto"
    seed: int = 0

    # -- what a method writes -----------------------------------------------------------------------------

    @abstractmethod
    def _releases(self, public: PublicFacts) -> list[Release]:
        """The releases to come. Noise left open is calibrated to the budget."""

    @abstractmethod
    def _fit(self, vault: Vault, public: PublicFacts) -> None:
        """Learns from the vault's answers; sets names that end in `_`."""

    @abstractmethod
    def _sample(self, labels: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        """One image for each label: float in [-1, 1], [N, C, H, W]."""

    @abstractmethod
    def _state(self) -> dict[str, torch.Tensor]:
        """What was learned, as tensors."""

    @abstractmethod
    def _restore(self, public: PublicFacts, state: dict[str, torch.Tensor]) -> None:
        """The inverse of `_state`."""

    def _log_likelihood(self, images: torch.Tensor, label: int) -> torch.Tensor:  # noqa: ARG002
        """Log-likelihood of each image (float in [-1, 1], [N, C, H, W]) in that class, [N]."""
        raise ValueError(f"{self.key} has no likelihood: it cannot score images; dp-lflow can")

    @property
    def _protected(self) -> bool:
        """Whether, with these parameters, the method sees releases only."""
        return self.guarantee == "differential-privacy"

    def _facts(self, public: PublicFacts) -> dict[str, Any]:  # noqa: ARG002
        """What else is taken as public, for the certificate; asked for before anything is spent."""
        return {}

    def _suiting(self, public: PublicFacts) -> dict[str, Any]:  # noqa: ARG002
        """Parameters that take other values where public facts ask for them, while a model is planned and fitted.

        Never those in `SETTLED`. A warm start takes the method that goes before as it is.
        """
        return {}

    def _proportions(self) -> torch.Tensor:
        """Share of each class among samples whose labels are left open."""
        return torch.ones(len(self._fitted().classes))

    # -- what a user calls --------------------------------------------------------------------------------

    def public_facts(self, images: ImageSet) -> PublicFacts:
        """What this method takes as public: shape and class names, and sizes if they were declared so."""
        return images.public(declare_size=self.public_size)

    def plan(self, public: PublicFacts) -> Plan:
        """The releases to come and their noise; touches no pixel and spends nothing."""
        plan = calibrate(replace(self, **self._suited(public))._releases(public), self._budget(public.unit))
        if not self._protected:  # a form that takes the raw images has no releases to account for
            return Plan((Release("unprotected", noise_multiplier=0.0),), replace(plan.budget, epsilon=math.inf))
        return plan

    def explain_plan(self, public: PublicFacts) -> list[str]:  # noqa: ARG002
        """Lines that say what the planned noise does to what is learned; from public facts alone."""
        return []

    def fit(
        self,
        images: ImageSet,
        *,
        run_dir: str | Path | None = None,
        resume: bool = False,
        budget: str | Path | None = None,
        max_per_person: int = MAX_PER_PERSON,
        sign: str | Path | None = None,
        issuer: str | None = None,
        subject: str | None = None,
    ) -> Self:
        """Learn from private images.

        - run_dir: a folder for ledger, model and certificate, and for checkpoints on the way.
        - resume: go on with a run that was interrupted there.
        - budget: file of the data set's budget over many runs (`sfumato budget open`), which this run pays into.
        - max_per_person: public cap on the images of a person that are used, where images have persons.
        - sign: file of a private key that signs the certificate. issuer, subject: who issues it, about which data.
        """
        public, folder = self.validate().public_facts(images), None if run_dir is None else Path(run_dir)
        if sign is not None:
            signing.sign("", sign)  # a key that does not work is found before anything is spent
        with self._with(self._suited(public)):
            certificate = self._fit_through(images, public, folder, resume, budget, max_per_person)
        self.public_, self.certificate_ = public, replace(certificate, issuer=issuer, subject=subject)
        if folder is not None:
            self.save(folder, sign=sign)
            remove_checkpoint(folder)
        return self

    def _fit_through(
        self,
        images: ImageSet,
        public: PublicFacts,
        folder: Path | None,
        resume: bool,
        budget: str | Path | None,
        max_per_person: int,
    ) -> Certificate:
        """Fit through a vault; what it is called with is what the ledger says."""
        plan = calibrate(self._releases(public), self._budget(public.unit))  # refuses before there is a ledger
        account = None if budget is None else Account(budget)
        if account is not None and not (self._protected and plan.budget.private):
            raise BudgetExceeded(f"this run promises no privacy: it cannot be charged to {budget}")
        if account is not None and not resume and (refusal := account.refusal(plan)):
            raise BudgetExceeded(refusal)  # before there is a ledger
        facts = {**asdict(public), **self._facts(public)}
        if folder is not None and started(folder):
            if not resume:
                raise DataError(
                    f"{folder} holds a run already; go on with resume=True (--resume) or choose another folder"
                )
            if (folder / "certificate.json").exists():
                remove_checkpoint(folder)
                raise DataError(f"{folder} holds a finished run; load its model, or choose another folder")
        for name in [name for name in vars(self) if name.endswith("_")]:
            delattr(self, name)  # nothing of an earlier fit may meet this one's certificate
        with Ledger(None if folder is None else folder / "ledger.jsonl") as ledger, ExitStack() as stack:
            kept = None if folder is None else stack.enter_context(closing(Kept(folder, ledger)))
            vault = self.vault_type(
                images,
                plan,
                ledger=ledger,
                facts={"method": self.key, "parameters": self._json_params(), "public_facts": _plain(facts)},
                kept=kept,
                account=account,
                device=self.torch_device,
                secure=self.secure,
                max_per_person=max_per_person,
                performance=Performance(),
            )
            self._checkpoints = Checkpoints(folder, vault)
            try:
                self._fit(vault, public)
            finally:
                del self._checkpoints
            return Certificate.from_ledger(ledger, claimed=self.claimed)

    def most(self, public: PublicFacts) -> int | None:  # noqa: ARG002
        """The number of images that a fitted model can give; None if there is no limit."""
        return None

    def sample(
        self, n: int, *, labels: int | str | Sequence[int] | None = None, seed: int = 0, **options: Any
    ) -> ImageSet:
        """`n` synthetic images: of one class, of the classes given one by one, or as the classes are released.

        `options` are parameters in `adjustable`, with other values than those that were saved.
        """
        public = self._fitted()
        if n < 1:
            raise ValueError(f"the number of images must be at least 1, got {n}")
        wanted = self._labels(n, labels)
        generator = torch.Generator(device=self.torch_device).manual_seed(seed)
        with torch.no_grad(), self._adjusted(options):
            parts = [
                ((self._sample(part.to(self.torch_device), generator).clamp(-1, 1) + 1) * 127.5).round().byte().cpu()
                for part in torch.split(wanted, self.sample_batch)
            ]
        return ImageSet(torch.cat(parts), wanted if public.labelled else None, public.classes)

    def score(self, images: ImageSet, *, label: int | str | None = None, **options: Any) -> torch.Tensor:
        """Log-likelihood of each image, [N]: in one class, or in all of them, each with its share among samples.

        The model is post-processing of releases, and so is this: it costs no privacy of the images that were learned
        from. Scores say something of the images that are scored. Methods without a likelihood raise `ValueError`.
        """
        public = self._fitted()
        if images.shape != public.shape:
            raise DataError(f"images to score must be {public.shape} like those of the model, not {images.shape}")
        shares = self._proportions().double().clamp_min(0)
        shares = shares / shares.sum() if shares.sum() > 0 else torch.full_like(shares, 1 / len(shares))
        chosen = range(len(shares)) if label is None else self._labels(1, label).tolist()
        weights = shares.log() if label is None else torch.zeros(len(shares))
        found = []
        with torch.no_grad(), self._adjusted(options):
            for part in torch.split(images.images, self.sample_batch):
                pixels = part.to(self.torch_device).float() / 127.5 - 1
                each = [self._log_likelihood(pixels, one).cpu().double() + weights[one] for one in chosen]
                found.append(torch.stack(each).logsumexp(0))
        return torch.cat(found)

    def save(self, folder: str | Path, *, sign: str | Path | None = None) -> Path:
        """Write the model (safetensors and JSON) and its certificate, which covers them; `sign`: a private key."""
        target, public = Path(folder), self._fitted()
        content = {
            "format": FORMAT,
            "method": self.key,
            "parameters": self.certificate_.parameters | self._adjustable_params(),
            "public": asdict(public),
        }
        with replacing(target / "model.safetensors", overwrite=True) as partial:
            save_file({name: value.detach().cpu().contiguous() for name, value in self._state().items()}, partial)
        with replacing(target / "config.json", overwrite=True) as partial:
            partial.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", "utf-8")
        names = [name for name in ("model.safetensors", "config.json", "ledger.jsonl") if (target / name).exists()]
        self.certificate_ = self.certificate_.covering(target, names)
        if sign is not None:
            self.certificate_ = self.certificate_.signed(sign)
        self.certificate_.save(target / "certificate.json")
        return target

    def _load(self, folder: Path, public: PublicFacts) -> Self:
        self.public_ = public
        self._restore(public, load_file(folder / "model.safetensors", device=str(self.torch_device)))
        self.certificate_ = Certificate.load(folder / "certificate.json")
        return self

    def get_params(self) -> dict[str, Any]:
        """Every parameter and its value."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def set_params(self, **params: Any) -> Self:
        """Sets parameters by name."""
        self.check_params(params)
        for name, value in params.items():
            setattr(self, name, value)
        return self

    @classmethod
    def check_params(cls, params: dict[str, Any]) -> None:
        """Raises for a name that is no parameter, and says which one is nearest."""
        known = [field.name for field in fields(cls)]
        for name in params:
            if name not in known:
                near = difflib.get_close_matches(name, known, 1)
                hint = f"; did you mean {near[0]!r}?" if near else f"; it has {', '.join(known)}"
                raise ValueError(f"{cls.key} has no parameter {name!r}{hint}")

    def validate(self) -> Self:
        """Raises `ValueError` for a parameter of the wrong kind or out of range; called before anything is read."""
        self._budget()
        for field in fields(self):
            _check_like(field.name, getattr(self, field.name), field.default, zero=field.name in self.may_be_zero)
        chosen_device(self.device)
        return self

    @property
    def torch_device(self) -> torch.device:
        return chosen_device(self.device)

    # -- parts --------------------------------------------------------------------------------------------

    def _json_params(self) -> dict[str, Any]:
        """The parameters as JSON can hold them; `from_json` reads them back."""
        kinds = {field.name: type(field.default) for field in fields(self)}
        params = {name: _cast(value, kinds[name]) for name, value in self.get_params().items()}
        return _plain({name: "inf" if value == math.inf else value for name, value in params.items()})

    def _adjustable_params(self) -> dict[str, Any]:
        """Those that may have changed since the certificate was made."""
        return {name: value for name, value in self._json_params().items() if name in self.adjustable}

    @classmethod
    def from_json(cls, params: dict[str, Any]) -> Self:
        special: dict[str, Any] = {name: math.inf for name, value in params.items() if value == "inf"}
        special |= {name: tuple(value) for name, value in params.items() if isinstance(value, list)}
        return cls(**{**params, **special})

    @contextmanager
    def _adjusted(self, options: dict[str, Any]) -> Iterator[None]:
        """These parameters of samples for a while."""
        self.check_params(options)
        if fixed := sorted(options.keys() - self.adjustable):
            may = ", ".join(sorted(self.adjustable)) or "none can"
            raise ValueError(f"{fixed[0]} cannot be changed after fit; of {self.key}'s parameters these can: {may}")
        with self._with(options):
            yield

    def _suited(self, public: PublicFacts) -> dict[str, Any]:
        suiting = self._suiting(public)
        if fixed := sorted(SETTLED & suiting.keys()):
            raise ValueError(f"{self.key} must not change {fixed[0]}: that is the user's to say")
        return suiting

    @contextmanager
    def _with(self, params: dict[str, Any]) -> Iterator[None]:
        """These parameters for a while."""
        before = {name: getattr(self, name) for name in params}
        try:
            self.set_params(**params).validate()
            yield
        finally:
            self.set_params(**before)

    def _budget(self, unit: Unit = "image") -> Budget:
        return Budget(float(self.epsilon), float(self.delta), self.adjacency, unit)

    def _fitted(self) -> PublicFacts:
        if not hasattr(self, "public_"):
            raise NotFittedError("this model has learned nothing yet; call fit first")
        public: PublicFacts = self.public_
        return public

    def _labels(self, n: int, labels: int | str | Sequence[int] | None) -> torch.Tensor:
        classes = self._fitted().classes
        if labels is None:
            return _allocate(n, self._proportions())
        if isinstance(labels, str):
            if labels not in classes:
                raise ValueError(f"there is no class {labels!r}; there are {', '.join(classes)}")
            labels = classes.index(labels)
        wanted = torch.full((n,), labels) if isinstance(labels, int) else torch.as_tensor(labels, dtype=torch.int64)
        if len(wanted) != n:
            raise ValueError(f"{n} images were asked for and {len(wanted)} labels given")
        if wanted.min() < 0 or wanted.max() >= len(classes):
            raise ValueError(f"labels must lie between 0 and {len(classes) - 1}")
        return wanted


def chosen_device(name: str) -> torch.device:
    """The device of that name; `auto`: a GPU if there is one."""
    if not isinstance(name, str):
        raise ValueError(f"device must be text, got {name!r}")
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        return torch.device(name)
    except RuntimeError:
        raise ValueError(f"device must be auto, cpu or cuda, got {name!r}") from None


def _check_like(name: str, value: Any, default: Any, *, zero: bool = False) -> None:
    """A parameter must be of its default's kind; numbers must be greater than 0, or some 0, but for the seed."""
    if isinstance(default, bool):
        if not isinstance(value, bool):
            raise ValueError(f"{name} must be True or False, got {value!r}")
    elif isinstance(default, int | float):
        whole = isinstance(default, int)
        if isinstance(value, bool) or not isinstance(value, int if whole else int | float):
            raise ValueError(f"{name} must be a {'whole ' if whole else ''}number, got {value!r}")
        if name != "seed" and not (value > 0 or (zero and value == 0)):
            raise ValueError(f"{name} must be {'0 or greater' if zero else 'greater than 0'}, got {value!r}")
    elif isinstance(default, tuple):
        if not isinstance(value, list | tuple) or len(value) != len(default):
            raise ValueError(f"{name} must be {len(default)} numbers, got {value!r}")
        for part, like in zip(value, default, strict=True):
            _check_like(name, part, like, zero=zero)
    elif isinstance(default, str) and not isinstance(value, str):
        raise ValueError(f"{name} must be text, got {value!r}")


def _allocate(n: int, proportions: torch.Tensor) -> torch.Tensor:
    """`n` labels in these proportions, by largest remainders, in class order."""
    shares = proportions.double().clamp_min(0)
    shares = n * shares / shares.sum() if shares.sum() > 0 else torch.full_like(shares, n / len(shares))
    counts = shares.floor().long()
    order = (shares - counts).argsort(descending=True, stable=True)
    counts[order[: n - int(counts.sum())]] += 1
    return torch.repeat_interleave(torch.arange(len(counts)), counts)


def started(folder: Path) -> bool:
    """Whether a run has written anything to its ledger there."""
    ledger = folder / "ledger.jsonl"
    return ledger.exists() and ledger.stat().st_size > 0


def _cast(value: Any, kind: type) -> Any:
    """1 and 1.0 are one setting: a ledger made with either can be resumed with the other."""
    if kind is tuple:
        return [float(part) for part in value]
    return float(value) if kind is float else value


def _plain(content: dict[str, Any]) -> dict[str, Any]:
    """As it will be read back: JSON has lists where Python has tuples."""
    plain: dict[str, Any] = json.loads(json.dumps(content, allow_nan=False))
    return plain
