"""Two models that train against each other, each with its own optimizer: a ring of eight Gaussians, with PyTorch.

    p3 run -n 2 -s 2 python examples/torch/gan.py

The generator's loss passes through the discriminator, which is frozen meanwhile, as its gradients are not needed there.
"""

import argparse
import math

import p3.torch
import torch
from torch import nn

NOISE = 8


def real(count, generator):
    angle = torch.randint(8, (count,), generator=generator) * (math.pi / 4)
    centre = torch.stack([angle.cos(), angle.sin()], 1)
    return centre + 0.05 * torch.randn(count, 2, generator=generator)


def mlp(inputs, outputs):
    hidden = [nn.Linear(inputs, 64), nn.LeakyReLU(0.2), nn.Linear(64, 64), nn.LeakyReLU(0.2)]
    return nn.Sequential(*hidden, nn.Linear(64, outputs))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=600)
    options = parser.parse_args()

    rank, size = p3.torch.rank(), p3.torch.size()
    torch.manual_seed(1)
    generator, discriminator = mlp(NOISE, 2), mlp(2, 1)
    of_generator = torch.optim.Adam(generator.parameters(), lr=1e-3, betas=(0.5, 0.99))
    of_discriminator = torch.optim.Adam(discriminator.parameters(), lr=1e-3, betas=(0.5, 0.99))
    p3.torch.DistributedOptimizer(of_generator, generator)
    p3.torch.DistributedOptimizer(of_discriminator, discriminator)

    random = torch.Generator().manual_seed(100 + rank)
    loss_of = nn.functional.binary_cross_entropy_with_logits
    count = 128 // size
    ones, zeros = torch.ones(count, 1), torch.zeros(count, 1)
    for _ in range(options.steps):
        fake = generator(torch.randn(count, NOISE, generator=random))
        of_discriminator.zero_grad()
        true_loss = loss_of(discriminator(real(count, random)), ones)
        (true_loss + loss_of(discriminator(fake.detach()), zeros)).backward()
        of_discriminator.step()

        of_generator.zero_grad()
        discriminator.requires_grad_(False)
        loss_of(discriminator(fake), ones).backward()
        discriminator.requires_grad_(True)
        of_generator.step()

    with torch.no_grad():
        points = generator(torch.randn(1000, NOISE, generator=torch.Generator().manual_seed(3)))
        angles = torch.arange(8) * (math.pi / 4)
        distance = torch.cdist(points, torch.stack([angles.cos(), angles.sin()], 1)).min(1).values.mean()
    print("worker %d of %d: made points lie at a distance %.3f to the nearest centre" % (rank, size, distance))


if __name__ == "__main__":
    main()
