"""`python -m fedrts_kernels` compiles the library."""

from fedrts_kernels.build import main

main()
