"""Priors: diffusion models of public or procedural images, the starting point of methods that take `prior=`.

`load_prior` reads one by name or path, `train_prior` makes one of public images, `list_priors` lists what is at hand.
`random_process` draws procedural images.
"""

from sfumato.priors.denoising import train_prior
from sfumato.priors.prior import Prior, PriorCard, list_priors, load_prior, save_prior

__all__ = ["Prior", "PriorCard", "list_priors", "load_prior", "save_prior", "train_prior"]
