"""Readers and writers of image sets, and the named data sets."""

from .errors import DataError, DataWarning
from .grid import contact_sheet
from .imageset import ImageSet, PublicFacts, shared_images
from .load import load_images
from .named import NamedSet, find_named, get_named, named_sets
from .save import save_images

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
    "save_images",
    "shared_images",
]
