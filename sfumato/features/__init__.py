"""Feature maps of images that use no private data: public networks, wavelet scattering, random Fourier features.

`FeatureNetwork` (Inception-v3, EfficientNet-Lite0) computes the features of the fidelity scores. `Perceptual` returns
every ReLU activation of a public network (VGG, ResNet, EfficientNet-Lite0, two small encoders that are part of the
package). `Scattering` has no weights. `RandomFourierFeatures` and `PointEvaluations` release kernel mean embeddings.
`weights` finds, downloads and checks weight files; `train_encoder` trains the small encoders.
"""

from sfumato.features.feature_network import CARDS, Card, FeatureNetwork, Features, features, load_feature_network
from sfumato.features.fourier import FrequencyBlock, PointEvaluations, RandomFourierFeatures
from sfumato.features.kernels import GaussianKernel, WindowedSpectrum
from sfumato.features.perceptual import PERCEPTUAL, Perceptual, PerceptualCard, load_perceptual, save_perceptual
from sfumato.features.public_autoencoder import Autoencoder, latent_shape, load_autoencoder
from sfumato.features.scattering import Scattering

__all__ = [
    "CARDS",
    "PERCEPTUAL",
    "Autoencoder",
    "Card",
    "FeatureNetwork",
    "Features",
    "FrequencyBlock",
    "GaussianKernel",
    "Perceptual",
    "PerceptualCard",
    "PointEvaluations",
    "RandomFourierFeatures",
    "Scattering",
    "WindowedSpectrum",
    "features",
    "latent_shape",
    "load_autoencoder",
    "load_feature_network",
    "load_perceptual",
    "save_perceptual",
]
