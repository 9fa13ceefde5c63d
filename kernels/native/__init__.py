"""The native library: plain C, one shared object in the wheel, loaded once by ctypes.

`*.c` are its sources, `native_library.py` loads it; each room's `native*.py` knows the signatures. Out: C functions on
raw pointers, which keep no state and release the interpreter's lock. No headers of torch or Python are used, nothing is
compiled at run time.
"""
