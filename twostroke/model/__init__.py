"""What is computed: a model as data, and the one pass over its layers.

arch.py           `Arch`: layers, shapes, positions, windows; products, FLOPs and cache entries follow from it
families.py       from config.json to an `Arch`, a function for each family; families_gguf.py: from GGUF metadata
document.py       an `Arch` as plain data, and back
fields.py         values of such files, read without trusting them; quantization.py: which format of few bits they name
names.py          our parameter names, and where each lies in a checkpoint; source.py: one such place
entry.py          what a layer keeps in the KV cache
latent.py         latent attention: its description and its layer
compressed.py     compressed attention, the same; compressed_config.py, compressed_names.py: from DeepSeek V4's files;
                  compressed_gguf.py: from its GGUF files
experts.py        feeds with experts from a config; expert_names.py: where they lie in a checkpoint
rope.py           rotary frequencies with every kind of scaling; rope_table.py: their cosines and sines
layers.py         a loaded layer: a mixer and a feed with their weights
streams.py        a layer over several residual streams
transformer.py    the forward pass
shares.py         a model in equal parts for several processes; parallel.py: the forward pass of one of them
"""
