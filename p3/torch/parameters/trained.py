"""Which tensors P3 trains, by the names of their keys. Kept beside them: a copy of a tensor, or a pickle, takes along
what is within it, and is trained by nobody."""

from torch.utils.weak import WeakTensorKeyDictionary

names = WeakTensorKeyDictionary()
