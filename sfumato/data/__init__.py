"""Read and write image sets; find and download named data sets."""

from sfumato.data.errors import DataError, DataWarning
from sfumato.data.grid import contact_sheet
from sfumato.data.imageset import ImageSet, PublicFacts, shared_images
from sfumato.data.load import load_images, read_outline
from sfumato.data.named import NamedSet, find_named, get_named, named_sets
from sfumato.data.python_datasets import to_hugging_face
from sfumato.data.save import save_images

__all__ = [
    "DataError",
    "DataWarning",
    "ImageSet",
    "NamedSet",
    "PublicFacts",
    "contact_sheet",
    "find_named",
    "get_named",
    "load_images",
    "named_sets",
    "read_outline",
    "save_images",
    "shared_images",
    "to_hugging_face",
]
