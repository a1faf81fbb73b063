"""Networks, samplers and augmentation of the methods and of the evaluation.

`generators` and `PerClass` (conditional image generators), `classifiers` (the networks of the evaluation protocol),
`ConvEncoder`, `ConvDecoder`, `RealNVP` and `latent_flow` (DP-LFlow), `UNet`, `ScoreNetwork` and `samplers` (PGE),
`random_convnet` and `augmentation` (dataset condensation), `stacked` (several networks of one architecture as one
module), `norm_relu_pool` (fused GPU kernel). Generators and classifiers may have batch norm; all other networks treat
the images of a batch independently, so per-example gradients are defined.
"""

from sfumato.nets.augmentation import Augmentation, draw_augmentation, small_affine_warp
from sfumato.nets.classifiers import CLASSIFIER_NETWORKS
from sfumato.nets.conv_autoencoder import ConvDecoder, ConvEncoder
from sfumato.nets.flow import RealNVP
from sfumato.nets.generators import GENERATORS, PerClass, class_weights, refresh_batch_norm
from sfumato.nets.samplers import SAMPLERS, annealed_sampling, noise_levels
from sfumato.nets.score import SCORE_KINDS, ScoreNetwork, denoising_loss, sliced_loss
from sfumato.nets.unet import UNet

__all__ = [
    "CLASSIFIER_NETWORKS",
    "GENERATORS",
    "SAMPLERS",
    "SCORE_KINDS",
    "Augmentation",
    "ConvDecoder",
    "ConvEncoder",
    "PerClass",
    "RealNVP",
    "ScoreNetwork",
    "UNet",
    "annealed_sampling",
    "class_weights",
    "denoising_loss",
    "draw_augmentation",
    "noise_levels",
    "refresh_batch_norm",
    "sliced_loss",
    "small_affine_warp",
]
