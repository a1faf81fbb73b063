"""The base class of all methods: an estimator that sees private images only through a vault."""

from __future__ import annotations

import json
import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from safetensors.torch import load_file, save_file

from sfumato.certificate import Certificate, signing
from sfumato.certificate.dataset_budget import DatasetBudget
from sfumato.certificate.spending import SpendingText
from sfumato.cluster import ClusterVault, ShardedImages, check_apart, open_shards
from sfumato.data import DataError, ImageSet, PublicFacts
from sfumato.data.atomic import replacing
from sfumato.data.pixels import to_bytes, to_unit_range
from sfumato.engine import GradientVault, Performance, calibrate
from sfumato.engine.kept_results import KeptResults
from sfumato.methods.checkpoints import Checkpoints, check_run_folder, remove_checkpoint
from sfumato.methods.class_counts import allocate
from sfumato.methods.parameters import Parameterized, as_json, usable_device
from sfumato.privacy import BudgetExceeded, Ledger, Plan, Release
from sfumato.privacy.vault import MAX_PER_PERSON
from sfumato.progress import bar, show_spending

FORMAT = "sfumato-model/2"
ASSUMED_IMAGES = 30_000  # where class sizes are not declared public


def constant(default: Any) -> Any:
    """Declare a named constant of a method: no constructor parameter; presets and `with_constants` change it."""
    return field(default=default, init=False)


class NotFittedError(ValueError):
    """The model must be fitted first."""


@dataclass(kw_only=True, eq=False)
class Synthesizer(Parameterized, ABC):
    """A method: parameters in the constructor, `fit` on private images, then `sample` without limit.

    A subclass states its releases in `_releases` (from public facts only), learns in `_fit` from what the vault
    returns, and draws images in `_sample`. `_state` and `_restore` save and load what was learned. The parameters of
    every method: `Parameterized`.
    """

    paper: ClassVar[str]
    summary: ClassVar[str]
    guarantee: ClassVar[str] = "differential-privacy"
    claimed: ClassVar[dict[str, Any] | None] = None
    sample_batch: ClassVar[int] = 1000  # labels in one call of `_sample`
    vault_type: ClassVar[type[GradientVault]] = GradientVault  # replaced by `check_synthesizer`

    # -- what a method implements -------------------------------------------------------------------------

    @abstractmethod
    def _releases(self, public: PublicFacts) -> list[Release]:
        """Return the planned releases. Noise that is left open is calibrated to the budget."""

    @abstractmethod
    def _fit(self, vault: GradientVault, public: PublicFacts) -> None:
        """Learn from the vault's answers; set attributes whose names end in `_`."""

    @abstractmethod
    def _sample(self, labels: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        """Return one image per label: float in [-1, 1], [N, C, H, W]."""

    @abstractmethod
    def _state(self) -> dict[str, torch.Tensor]:
        """Return what was learned, as tensors by name."""

    @abstractmethod
    def _restore(self, public: PublicFacts, state: dict[str, torch.Tensor]) -> None:
        """Take back what `_state` returned."""

    def _log_likelihood(self, images: torch.Tensor, label: int) -> torch.Tensor:  # noqa: ARG002
        """Return the log-likelihood of each image (float in [-1, 1], [N, C, H, W]) in a class, [N]."""
        raise ValueError(f"{self.key} has no likelihood and cannot score images; use dp-lflow")

    @property
    def _protected(self) -> bool:
        """Whether the method sees releases only."""
        return self.guarantee == "differential-privacy"

    def _facts(self, public: PublicFacts) -> dict[str, Any]:  # noqa: ARG002
        """Return what else is taken as public, for the certificate. Called before anything is spent."""
        return {}

    def _proportions(self) -> torch.Tensor:
        """Return the share of each class among samples whose labels are left open."""
        return torch.ones(len(self._fitted().classes))

    # -- what a user calls --------------------------------------------------------------------------------

    def public_facts(self, images: ImageSet | ShardedImages) -> PublicFacts:
        """Return what this method takes as public: shape, class names, and class sizes if declared."""
        return images.public(declare_size=self.public_size)

    def plan(self, public: PublicFacts) -> Plan:
        """Return the planned releases and their noise. Touches no pixel and spends nothing."""
        plan = calibrate(self._resolved(public)._releases(public), self._budget(public.unit))
        if not self._protected:  # it takes the raw images, so there are no releases to account for
            return Plan((Release("unprotected", noise_multiplier=0.0),), replace(plan.budget, epsilon=math.inf))
        return plan

    def explain_plan(self, public: PublicFacts) -> list[str]:  # noqa: ARG002
        """Return lines that explain what the planned noise does to the result; from public facts only."""
        return []

    def fit(
        self,
        images: ImageSet | ShardedImages,
        *,
        cluster: Any = None,
        run_dir: str | Path | None = None,
        resume: bool = False,
        budget: str | Path | None = None,
        max_per_person: int = MAX_PER_PERSON,
        sign: str | Path | None = None,
        issuer: str | None = None,
        subject: str | None = None,
    ) -> Self:
        """Learn from private images.

        - images: of `load_images`, or of `open_shards`, which are never loaded whole.
        - cluster: "local" or the address of a Ray cluster, for images in memory, default None: this process. Images of
          `open_shards` are computed where they were opened.
        - run_dir: folder for ledger, model, certificate and checkpoints.
        - resume: continue an interrupted run in that folder.
        - budget: file of the data set's budget over many runs (`sfumato budget open`), which this run is charged to.
        - max_per_person: public cap on the images of a person that are used, where images have persons.
        - sign: file of a private key that signs the certificate.
        - issuer, subject: who issues it, about which data.
        """
        if not isinstance(images, ImageSet | ShardedImages):
            raise DataError(f"fit takes an ImageSet, not a {type(images).__name__}; read it with load_images first")
        usable_device(self.device)
        if isinstance(images, ShardedImages):
            check_apart(images.file, run_dir)
        if cluster is not None and isinstance(images, ImageSet):
            with open_shards(images, cluster=cluster) as shards:
                return self.fit(
                    shards,
                    run_dir=run_dir,
                    resume=resume,
                    budget=budget,
                    max_per_person=max_per_person,
                    sign=sign,
                    issuer=issuer,
                    subject=subject,
                )
        public, folder = self.validate().public_facts(images), None if run_dir is None else Path(run_dir)
        if sign is not None:
            signing.sign("", sign)  # a key that does not work is found before anything is spent
        worker = self._resolved(public)
        self._forget()
        certificate = worker._fit_through(images, public, folder, resume, budget, max_per_person)
        self._learned(worker)
        self.public_, self.certificate_ = public, replace(certificate, issuer=issuer, subject=subject)
        if folder is not None:
            self.save(folder, sign=sign)
            remove_checkpoint(folder)
        return self

    def _forget(self) -> None:
        """Drop an earlier fit: nothing of it may be combined with another certificate."""
        for name in [name for name in vars(self) if name.endswith("_")]:
            delattr(self, name)

    def _learned(self, worker: Synthesizer) -> None:
        """Take over what a resolved copy has learned, and the settings that it used."""
        vars(self).update({name: value for name, value in vars(worker).items() if name.endswith("_")})
        self.settings_ = {each.name: getattr(worker, each.name) for each in fields(worker)}

    def _fit_through(
        self,
        images: ImageSet | ShardedImages,
        public: PublicFacts,
        folder: Path | None,
        resume: bool,
        budget: str | Path | None,
        max_per_person: int,
    ) -> Certificate:
        """Fit through a vault; the ledger records the settings that are used."""
        plan = calibrate(self._releases(public), self._budget(public.unit))  # refuses before there is a ledger
        account = None if budget is None else DatasetBudget(budget)
        if account is not None and not (self._protected and plan.budget.private):
            raise BudgetExceeded(f"this run gives no privacy guarantee and cannot be charged to {budget}")
        if account is not None and not resume and (refusal := account.refusal(plan)):
            raise BudgetExceeded(refusal)  # before there is a ledger
        facts = {**asdict(public), **self._facts(public)}
        if folder is not None:
            check_run_folder(folder, resume)
        self._forget()
        with Ledger(None if folder is None else folder / "ledger.jsonl") as ledger, ExitStack() as stack:
            kept = None if folder is None else stack.enter_context(closing(KeptResults(folder, ledger)))
            sharded = isinstance(images, ShardedImages) and self.vault_type is GradientVault
            vault = (ClusterVault if sharded else self.vault_type)(
                images,
                plan,
                ledger=ledger,
                facts={"method": self.key, "parameters": self._json_params(), "public_facts": as_json(facts)},
                kept=kept,
                account=account,
                device=self.torch_device,
                secure=self.secure,
                max_per_person=max_per_person,
                performance=Performance(),
            )
            self._checkpoints = Checkpoints(folder, vault)
            show_spending(SpendingText(ledger.entries))
            try:
                with bar("fitting"):
                    self._fit(vault, public)
            finally:
                del self._checkpoints
            return Certificate.from_ledger(ledger, claimed=self.claimed)

    def max_samples(self, public: PublicFacts) -> int | None:  # noqa: ARG002
        """Return how many images a fitted model can give; None if there is no limit."""
        return None

    def sample(
        self, n: int, *, labels: int | str | Sequence[int] | None = None, seed: int = 0, **options: Any
    ) -> ImageSet:
        """Draw `n` synthetic images.

        - labels: one class, or a class for each image; default: in the proportions of the classes.
        - seed: of this draw.
        - options: other values of the parameters in `adjustable`.
        """
        public = self._fitted()
        if n < 1:
            raise ValueError(f"the number of images must be at least 1, got {n}")
        with torch.no_grad(), self._adjusted(options):
            wanted = self._labels(n, labels)
            generator = torch.Generator(device=self.torch_device).manual_seed(seed)
            batches = torch.split(wanted, self.sample_batch)
            parts: list[torch.Tensor] = []
            with bar("drawing images") as advance:
                for part in batches:
                    parts.append(to_bytes(self._sample(part.to(self.torch_device), generator)).cpu())
                    advance(sum(map(len, parts)), n)
        return ImageSet(torch.cat(parts), wanted if public.labelled else None, public.classes)

    def class_labels(self, n: int, labels: int | str | Sequence[int] | None = None) -> torch.Tensor:
        """Return the label of each of `n` samples, [n]; see `sample`."""
        self._fitted()
        return self._labels(n, labels)

    def score(self, images: ImageSet, *, label: int | str | None = None, **options: Any) -> torch.Tensor:
        """Return the log-likelihood of each image, [N]: in one class, or in the mixture of all classes.

        The model is post-processing of releases, so scoring costs no privacy of the training images. Scores describe
        the scored images. Methods without a likelihood raise `ValueError`.
        """
        public = self._fitted()
        if images.shape != public.shape:
            raise DataError(f"images to score must have the model's shape {public.shape}, not {images.shape}")
        found = []
        with torch.no_grad(), self._adjusted(options):
            shares = self._proportions().double().clamp_min(0)
            shares = shares / shares.sum() if shares.sum() > 0 else torch.full_like(shares, 1 / len(shares))
            chosen = range(len(shares)) if label is None else self._labels(1, label).tolist()
            weights = shares.log() if label is None else torch.zeros(len(shares))
            for part in torch.split(images.images, self.sample_batch):
                pixels = to_unit_range(part.to(self.torch_device))
                each = [self._log_likelihood(pixels, one).cpu().double() + weights[one] for one in chosen]
                found.append(torch.stack(each).logsumexp(0))
        return torch.cat(found)

    def save(self, folder: str | Path, *, sign: str | Path | None = None) -> Path:
        """Write the model (safetensors and JSON) and its certificate, which covers both; `sign`: a private key."""
        target, public = Path(folder), self._fitted()
        with self._adjusted({}):
            state = {name: value.detach().cpu().contiguous() for name, value in self._state().items()}
        adjusted = {name: value for name, value in self._json_params().items() if name in self.adjustable}
        content = {
            "format": FORMAT,
            "method": self.key,
            "parameters": self.certificate_.parameters | adjusted,
            "public": asdict(public),
        }
        with replacing(target / "model.safetensors", overwrite=True) as partial:
            save_file(state, partial)
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
        self.settings_ = {each.name: getattr(self, each.name) for each in fields(self)}
        self.certificate_ = Certificate.load(folder / "certificate.json")
        stated = self.certificate_.public_facts
        files = {
            name: fact for name, fact in self._facts(public).items() if isinstance(fact, dict) and "sha256" in fact
        }
        if changed := [name for name, fact in files.items() if stated.get(name) != as_json(fact)]:
            raise DataError(f"the public {changed[0]!r} is not the one that the certificate names; nothing was drawn")
        state = load_file(folder / "model.safetensors", device=str(self.torch_device))
        try:
            self._restore(public, state)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:  # of load_state_dict
            reason = str(error).splitlines()[-1].strip()
            raise DataError(
                f"{folder} holds a model whose networks are not those of this version; fit again, or use the version "
                f"that its certificate names ({reason})"
            ) from error
        return self

    # -- parts --------------------------------------------------------------------------------------------

    @contextmanager
    def _adjusted(self, options: dict[str, Any]) -> Iterator[None]:
        """Apply the settings of the fit, the current adjustable parameters, and these options, for a while."""
        self.check_params(options)
        if fixed := sorted(options.keys() - self.adjustable):
            may = ", ".join(sorted(self.adjustable)) or "none"
            raise ValueError(f"{fixed[0]} cannot change after fit; parameters of {self.key} that can: {may}")
        fixed_settings = {name: value for name, value in self.settings_.items() if name not in self.adjustable}
        before = {name: getattr(self, name) for name in self.settings_}
        try:
            vars(self).update({**fixed_settings, "device": self.device, **options})
            self.validate()
            yield
        finally:
            vars(self).update(before)

    def _noise_per_image(self, public: PublicFacts) -> float:
        """Return the noise multiplier of one release with the whole budget, over the number of images.

        From public facts: `ASSUMED_IMAGES` where sizes are not declared.
        """
        return calibrate([Release("all")], self._budget()).releases[0].noise / (
            sum(public.sizes or ()) or ASSUMED_IMAGES
        )

    def _fitted(self) -> PublicFacts:
        if not hasattr(self, "public_"):
            raise NotFittedError("this model is not fitted; call fit first")
        public: PublicFacts = self.public_
        return public

    def _labels(self, n: int, labels: int | str | Sequence[int] | None) -> torch.Tensor:
        classes = self._fitted().classes
        if labels is None:
            return allocate(n, self._proportions())
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
