// Nothing of its own: the program that headers.h is precompiled for.
