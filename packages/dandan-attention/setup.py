from dandan_ops_core.build import cuda_package

cuda_package(name="dandan_attention")
