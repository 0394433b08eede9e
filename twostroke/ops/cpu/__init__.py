"""The CPU backend: a C++ library behind ctypes.

backend.py    the ops, called with NumPy arrays; checks every shape before a pointer leaves Python
convert.py    weights put into formats that the library has
describe.py   layers, batches and caches as structures of addresses
experts.py    a layer's experts as a structure; arrays.py: addresses of arrays
decode.py     a step of newest tokens as one call; encode.py: encoders (the BERT family)
entries.py    lists of cache entries for compressed attention
ranks.py      sums over processes that share each layer's work
library.py    where the compiled library is, its functions and the structures it shares
build.py      compiles it: each instruction set is a translation unit with its own flags
native/       the C++ sources
    api.cpp         the C interface
    layers.cpp      all layers of a model in one call
    experts.cpp     a layer's experts: choice, products of each expert with all its rows, weighted sum
    linear.cpp      a product: prologue (norm, gate, quantization of inputs), panels shared out among threads
    attend.cpp      attention: tasks of (rows, head, split), their order and their merge
    entries.cpp     attention over a list of entries for each row
    latent.cpp      latent attention: each head's own products around the attention over shared entries
    pack.cpp        weights from a file's format into panels; quantize.cpp makes int8 and int4 from floats
    pool.cpp        the threads
    router.cpp      the router of a deployment (cluster/core.py is its specification); names.h: names of blocks;
                    router_holdings.h: what workers have
    isa/            one header of vector operations for each instruction set
    kernels/        written once with those operations, compiled for each instruction set
"""
