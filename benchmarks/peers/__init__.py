"""streamshard beside the libraries that people use instead, all in one run. ``make bench``, or ``python -m
benchmarks.peers``.

Three corpora (tokens, records of 1 KB, incompressible images of 110 KB), from a local directory and from the embedded
S3 server, with 0 and 2 workers. What is timed is one shuffled epoch in batches of 32 samples, each a dictionary as it
was written, tokens as numpy arrays of uint16, nothing stacked; every run is a process of its own with an empty cache
directory. Each peer is configured as its own documentation recommends; the file of each says where that is written
and what else was tried.

corpora.py     the samples
place.py       a directory or the S3 server, as the contenders are told of it
contender.py   what a contender has to be able to do;  one file for each
measure.py     one run, in a process of its own: python -m benchmarks.peers.measure '{...}'
__main__.py    alternates the runs and keeps raw figures
"""
