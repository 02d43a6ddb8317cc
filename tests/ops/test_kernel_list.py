"""The list of kernels that `k3jax kernels` inspects is whole, and holds what K3 launches."""

import pytest

from k3jax.config import MoEConfig
from k3jax.ops.kernels import all_kernels, classes, kernel_modules
from k3jax.ops.router import cute as router
from k3jax.runtime.serialize import program_kernels


def test_every_kernel_class_is_listed():
    for module in kernel_modules():
        listed = {type(kernel) for kernel in module.REPRESENTATIVES.values()}
        assert listed == set(classes(module)), module.__name__


def test_labels_are_unique():
    assert len(all_kernels()) == sum(len(module.REPRESENTATIVES) for module in kernel_modules())


@pytest.mark.parametrize("num_tokens", [1, 8, 9, 32, 33, 4096])
def test_router_kernels_of_k3_are_listed(num_tokens):
    config = MoEConfig.kimi_k3()
    program = router.route_program if num_tokens <= 32 else router.choose_program
    assert set(program_kernels(program(config, num_tokens))) <= set(all_kernels().values())
