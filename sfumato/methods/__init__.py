"""The methods. One file per system; `registry` knows them by their keys, and `as_published` holds the broken forms."""

from sfumato.methods.as_published.published_dp_kernel import PublishedKernelGenerator
from sfumato.methods.as_published.published_pge import PublishedGradientEstimation
from sfumato.methods.atelier import Atelier
from sfumato.methods.base import Synthesizer, constant
from sfumato.methods.dm import DistributionMatching
from sfumato.methods.dp_diffusion import DPDiffusion
from sfumato.methods.dp_kernel import KernelGenerator
from sfumato.methods.dp_lflow import LatentFlow
from sfumato.methods.dp_mepf import PerceptualEmbedding
from sfumato.methods.dp_merf import MeanEmbedding
from sfumato.methods.dpdc import LinearCondenser, NonlinearCondenser
from sfumato.methods.dpmix import Mixer
from sfumato.methods.parameters import Setting
from sfumato.methods.pge import GradientEstimation
from sfumato.methods.private_evolution import PrivateEvolution
from sfumato.methods.registry import METHODS, create, list_methods, load, register
from sfumato.methods.tuned import Tuned

for _method in (
    MeanEmbedding,
    PerceptualEmbedding,
    KernelGenerator,
    Atelier,
    DPDiffusion,
    PrivateEvolution,
    LatentFlow,
    GradientEstimation,
    NonlinearCondenser,
    LinearCondenser,
    Mixer,
    Tuned,
    DistributionMatching,
    PublishedKernelGenerator,
    PublishedGradientEstimation,
):
    register(_method)

__all__ = ["METHODS", "Setting", "Synthesizer", "constant", "create", "list_methods", "load", "register"]
