"""Loops of many kinds with DistributedDataParallel, in float64. Argument: batch size.

Each function of ``KINDS`` trains from the same start; its parameters are in the RESULT.
"""

import contextlib
import itertools
import json
import queue
import sys
import threading
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim import SGD
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, TensorDataset

BATCH_SIZE = int(sys.argv[1])
SAMPLES = 73  # three global batches of 21, and 10 samples

torch.set_default_dtype(torch.float64)
dist.init_process_group("gloo")
X = torch.randn(SAMPLES, 6, generator=torch.Generator().manual_seed(0))
DATA = TensorDataset(X, (X.sin().sum(1) > 0).long())
KINDS: dict[str, Callable[[], list[nn.Module]]] = {}


def kind(function: Callable[[], list[nn.Module]]) -> Callable[[], list[nn.Module]]:
    KINDS[function.__name__] = function
    return function


def net(inputs: int = 6, outputs: int = 2, **options: bool) -> DDP:
    return DDP(nn.Sequential(nn.Linear(inputs, 8), nn.Tanh(), nn.Linear(8, outputs)), **options)


def loader(**options: object) -> DataLoader:
    return DataLoader(DATA, BATCH_SIZE, sampler=DistributedSampler(DATA), **options)


def train(model: nn.Module, batches: DataLoader) -> list[nn.Module]:
    optimizer = SGD(model.parameters(), lr=0.3)
    for x, y in batches:
        optimizer.zero_grad()
        cross_entropy(model(x), y).backward()
        optimizer.step()
    return [model]


@kind
def generator_and_discriminator() -> list[nn.Module]:
    generator, discriminator = net(2, 6), net(6, 1)
    generates = SGD(generator.parameters(), lr=0.3)
    discriminates = SGD(discriminator.parameters(), lr=0.3)
    for x, _y in loader():
        real, noise = torch.ones(len(x), 1), x[:, :2].cos()
        discriminates.zero_grad()
        images = generator(noise)
        for inputs, target in ((x, real), (images.detach(), 0 * real)):
            binary_cross_entropy_with_logits(discriminator(inputs), target).backward()
        discriminates.step()
        generates.zero_grad()
        binary_cross_entropy_with_logits(discriminator(images), real).backward()
        generates.step()
    return [generator, discriminator]


@kind
def encoder_and_decoder() -> list[nn.Module]:
    encoder, decoder = net(6, 3), net(3, 6)
    optimizer = SGD([*encoder.parameters(), *decoder.parameters()], lr=0.3)
    for x, _y in loader():
        optimizer.zero_grad()
        codes = {"codes": (encoder(x),)}
        nn.functional.mse_loss(decoder(*codes["codes"]), x).backward()
        optimizer.step()
    return [encoder, decoder]


@kind
def adversarial_examples() -> list[nn.Module]:
    model = net()
    optimizer = SGD(model.parameters(), lr=0.3)
    for x, y in loader():
        x.requires_grad_()
        (gradient,) = torch.autograd.grad(cross_entropy(model(x), y), x)
        optimizer.zero_grad()
        # not the sign alone: of the size too, which the batch of the loss decides
        attacked = x.detach() + 0.1 * (gradient * len(x)).tanh()
        cross_entropy(model(attacked), y).backward()
        optimizer.step()
    return [model]


def evaluated(model: nn.Module, valid: DataLoader, *, inside: bool) -> None:
    model.eval()
    with torch.set_grad_enabled(inside):
        for x, _y in valid:
            with torch.no_grad():
                model(x)
    model.train()


@kind
def evaluation_before_the_step() -> list[nn.Module]:
    model = net()
    optimizer = SGD(model.parameters(), lr=0.3)
    valid = DataLoader(DATA, 5, sampler=DistributedSampler(DATA, shuffle=False))
    for index, (x, y) in enumerate(loader()):
        evaluated(model, valid, inside=index % 2 == 0)
        optimizer.zero_grad()
        cross_entropy(model(x), y).backward()
        optimizer.step()
    return [model]


@kind
def look_at_a_first_batch() -> list[nn.Module]:
    batches = loader()
    next(iter(batches))
    return train(net(), batches)


@kind
def workers_that_stay() -> list[nn.Module]:
    model, batches = net(), loader(num_workers=2, persistent_workers=True, prefetch_factor=2)
    for epoch in range(2):
        batches.sampler.set_epoch(epoch)
        train(model, batches)
    return [model]


@kind
def sampler_without_set_epoch() -> list[nn.Module]:
    model, batches = net(), loader()
    train(model, batches)
    return train(model, batches)


@kind
def batch_sampler() -> list[nn.Module]:
    batches = BatchSampler(DistributedSampler(DATA), BATCH_SIZE, drop_last=True)
    return train(net(), DataLoader(DATA, batch_sampler=batches))


@kind
def options_of_ddp() -> list[nn.Module]:
    first = train(net(gradient_as_bucket_view=True, static_graph=True), loader())
    return first + train(net(find_unused_parameters=True), loader())


@kind
def model_in_eval() -> list[nn.Module]:
    return train(net().eval(), loader())


@kind
def loss_scaler() -> list[nn.Module]:
    model = net()
    optimizer, scaler = SGD(model.parameters(), lr=0.3), torch.amp.GradScaler("cpu")
    for x, y in loader():
        optimizer.zero_grad()
        scaler.scale(cross_entropy(model(x), y)).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        scaler.step(optimizer)
        scaler.update()
    return [model]


@kind
def two_views() -> list[nn.Module]:
    model = net()
    optimizer = SGD(model.parameters(), lr=0.3)
    for x, y in loader():
        optimizer.zero_grad()
        one, other = model(torch.cat([x, x.cos()])).chunk(2)
        (cross_entropy(one, y) + (one - other.detach()).square().mean()).backward()
        optimizer.step()
    return [model]


@kind
def batches_collected_for_a_step() -> list[nn.Module]:
    model = net()
    optimizer = SGD(model.parameters(), lr=0.3)

    def pairs() -> Iterator[list[list[Tensor]]]:
        held: list[list[Tensor]] = []
        for batch in loader():
            held.append(batch)
            if len(held) == 2:
                yield held
                held = []

    for pair in pairs():
        optimizer.zero_grad()
        with model.no_sync():
            cross_entropy(model(pair[0][0]), pair[0][1]).backward()
        cross_entropy(model(pair[1][0]), pair[1][1]).backward()
        optimizer.step()
    return [model]


@kind
def two_calls_for_one_backward() -> list[nn.Module]:
    model = net()
    optimizer = SGD(model.parameters(), lr=0.3)
    for x, y in loader():
        optimizer.zero_grad()
        losses = [cross_entropy(model(view), y) for view in (x, x.sin())]
        torch.stack(losses).mean().backward()
        optimizer.step()
    return [model]


@kind
def compiled_around() -> list[nn.Module]:
    model = net()
    compiled = torch.compile(model, backend="eager")
    optimizer = SGD(model.parameters(), lr=0.3)
    for x, y in loader():
        optimizer.zero_grad()
        cross_entropy(compiled(x), y).backward()
        optimizer.step()
    return [model]


@kind
def compiled_inside() -> list[nn.Module]:
    layers = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))
    return train(DDP(torch.compile(layers, backend="eager")), loader())


@kind
def resumed_in_an_epoch() -> list[nn.Module]:
    model = net()
    optimizer = SGD(model.parameters(), lr=0.3)
    for index, (x, y) in enumerate(loader()):
        if index < 2:
            continue
        optimizer.zero_grad()
        cross_entropy(model(x), y).backward()
        optimizer.step()
    return [model]


@kind
def batches_kept_in_a_list() -> list[nn.Module]:
    model, batches = net(), list(loader())
    train(model, batches)
    return train(model, batches)


@kind
def cycled_batches() -> list[nn.Module]:
    return train(net(), itertools.islice(itertools.cycle(loader()), 7))


@kind
def read_by_a_thread() -> list[nn.Module]:
    held: queue.Queue = queue.Queue(maxsize=2)

    def read() -> None:
        for batch in loader():
            held.put(batch)
        held.put(None)

    model, thread = net(), threading.Thread(target=read)
    thread.start()
    train(model, iter(held.get, None))
    thread.join()
    return [model]


@kind
def schedule_by_length_of_loader() -> list[nn.Module]:
    model, batches = net(), loader(drop_last=True)
    optimizer = SGD(model.parameters(), lr=0.3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.5, 2 * len(batches))
    for epoch in range(2):
        batches.sampler.set_epoch(epoch)
        for x, y in batches:
            optimizer.zero_grad()
            cross_entropy(model(x), y).backward()
            optimizer.step()
            schedule.step()
    return [model]


@kind
def texts_of_many_lengths() -> list[nn.Module]:
    """A collate function that pads: batches are dictionaries, time comes first."""

    def collate(samples: list[tuple[Tensor, Tensor]]) -> dict[str, Tensor]:
        lengths = [1 + int(y) + int(x[0] > 0) for x, y in samples]
        texts = nn.utils.rnn.pad_sequence(
            [x[:n] for (x, _), n in zip(samples, lengths, strict=True)]
        )
        return {"texts": texts, "labels": torch.stack([y for _, y in samples])}

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(1, 2, bias=False)  # padding adds nothing

        def forward(self, texts: Tensor) -> Tensor:
            return self.layer(texts[..., None]).sum(0)

    model = DDP(Model())
    optimizer = SGD(model.parameters(), lr=0.3)
    for batch in loader(collate_fn=collate):
        optimizer.zero_grad()
        cross_entropy(model(batch["texts"]), batch["labels"]).backward()
        optimizer.step()
    return [model]


@kind
def losses_without_reduction() -> list[nn.Module]:
    model = net()
    optimizer = SGD(model.parameters(), lr=0.3)
    for x, y in loader():
        optimizer.zero_grad()
        losses = cross_entropy(model(x), y, reduction="none")
        (losses.sum() / len(losses)).backward()
        optimizer.step()
    return [model]


@kind
def steps_repeated_on_a_batch() -> list[nn.Module]:
    model = net()
    optimizer = SGD(model.parameters(), lr=0.3)
    for x, y in loader():
        for _ in range(3):
            optimizer.zero_grad()
            cross_entropy(model(x), y).backward()
            optimizer.step()
    return [model]


@kind
def labelled_and_unlabelled() -> list[nn.Module]:
    model = net()
    optimizer = SGD(model.parameters(), lr=0.3)
    for (x, y), (u, _) in zip(loader(drop_last=True), loader(drop_last=True), strict=True):
        optimizer.zero_grad()
        outputs = model(torch.cat([x, u.cos()]))
        (cross_entropy(outputs[: len(x)], y) + outputs[len(x) :].square().mean()).backward()
        optimizer.step()
    return [model]


@kind
def with_join() -> list[nn.Module]:
    model = net()
    with model.join():
        return train(model, loader())


@kind
def accumulation_with_a_rest() -> list[nn.Module]:
    model = net()
    optimizer = SGD(model.parameters(), lr=0.3)
    batches = loader()
    for index, (x, y) in enumerate(batches):
        is_last = index % 3 == 2 or index + 1 == len(batches)
        with contextlib.nullcontext() if is_last else model.no_sync():
            (cross_entropy(model(x), y) / 3).backward()
        if is_last:
            optimizer.step()
            optimizer.zero_grad()
    return [model]


@kind
def metrics_of_all_ranks() -> list[nn.Module]:
    """Chooses the model that is best in an evaluation of equal parts."""
    model = net()
    optimizer = SGD(model.parameters(), lr=0.3)
    valid = DataLoader(
        torch.utils.data.Subset(DATA, range(42)),
        7 * 3 // dist.get_world_size(),
        sampler=DistributedSampler(range(42), shuffle=False),
    )
    best, kept = torch.tensor(torch.inf), [p.detach().clone() for p in model.parameters()]
    for x, y in loader():
        optimizer.zero_grad()
        cross_entropy(model(x), y).backward()
        optimizer.step()
        model.eval()
        loss = torch.stack([cross_entropy(model(u), v).detach() for u, v in valid]).mean()
        dist.all_reduce(loss)
        loss /= dist.get_world_size()
        model.train()
        if loss < best:
            best, kept = loss, [p.detach().clone() for p in model.parameters()]
    holder = nn.Module()
    for number, parameter in enumerate([*kept, best]):
        holder.register_parameter(str(number), nn.Parameter(parameter))
    return [holder]


found = {}
for name, run in KINDS.items():
    torch.manual_seed(1)
    models = run()
    values = [p.detach().flatten() for model in models for p in model.parameters()]
    found[name] = torch.cat(values).tolist()
print("RESULT", json.dumps(found))
dist.destroy_process_group()
