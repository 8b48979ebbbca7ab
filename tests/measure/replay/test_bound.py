"""The lower bound: what a few lines of arithmetic give, and never above what an ideal schedule reaches."""

import random
import re

import pytest
from ideal_schedule import ends_of_iterations
from processes import ROOT

from p3.plan.key_plan import SliceSize
from p3.measure.compressions import Compression
from p3.measure.replay import bound as bounds
from p3.measure.replay import models
from p3.measure.replay.bound import NO_OVERHEAD, Cluster, Overhead, bound, one_of_each

MB_PER_S = 8.0  # in Mbit/s


def model_of(*layers):
    """Layers as (megabytes, share of the time); backward takes twice as long as forward."""
    total = 3 * sum(share for _, share in layers)
    return models.Model("made", 1.0, tuple(
        models.Layer(
            "layer%d" % number,
            (models.Tensor("weight", (round(megabytes * 250_000),)),),
            share / total,
            2 * share / total,
        )
        for number, (megabytes, share) in enumerate(layers)
    ))


def seconds(model, compute_s, cluster, elements=1000, overhead=NO_OVERHEAD, **settings):
    return bound(model, compute_s, cluster, elements, overhead, **settings).seconds


def test_single_layer_hides_nothing_behind_its_computation():
    # On each NIC half of 3 MB pushed and half broadcast, and as much the other way.
    assert seconds(model_of((3, 1)), 2.0, one_of_each(2, MB_PER_S)) == pytest.approx(2.0 + 3.0)


def test_light_first_layer_lets_the_rest_hide():
    # The second layer's 3 MB have the backward and the forward step of the first, 4.5 of 6 s, to hide behind.
    model = model_of((0.008, 3), (3, 1))
    assert seconds(model, 6.0, one_of_each(2, MB_PER_S)) == pytest.approx(6.0 + 0.008)


def test_heavy_last_layer_that_takes_longer_than_the_first_one_computes_is_exposed():
    # All 5.008 MB must pass while the second layer, 1.5 of 6 s, is not computed.
    model = model_of((0.008, 3), (5, 1))
    assert seconds(model, 6.0, one_of_each(2, MB_PER_S)) == pytest.approx(1.5 + 5.008)


def test_heavy_first_layer_is_exposed_whole():
    assert seconds(model_of((3, 1), (0.1, 9)), 2.0, one_of_each(2, MB_PER_S)) == pytest.approx(2.0 + 3.0)


def test_middle_layer_can_be_the_one_that_counts():
    # Layers 0 and 1, 2 MB, against the 1 + 8 of 10 s between layer 1's use and its gradient.
    model = model_of((0.008, 1), (1.992, 1), (0.004, 8))
    assert seconds(model, 10.0, one_of_each(2, MB_PER_S)) == pytest.approx(9.0 + 2.0)


def test_late_gradients_hide_behind_the_forward_pass_alone():
    # The second layer's 3 MB have the forward step of the first, 1.5 of 6 s, to hide behind; the first layer's nothing.
    model = model_of((0.008, 3), (3, 1))
    late = seconds(model, 6.0, one_of_each(2, MB_PER_S), release="end")
    assert late == pytest.approx(4.5 + 3.008)
    assert late - seconds(model, 6.0, one_of_each(2, MB_PER_S)) == pytest.approx(3.008 - 1.5 - 0.008)


def test_late_gradients_of_a_single_layer_are_no_later():
    model, cluster = model_of((3, 1)), one_of_each(2, MB_PER_S)
    assert seconds(model, 2.0, cluster, release="end") == seconds(model, 2.0, cluster)


def timed(*layers):
    """Layers as (megabytes, seconds forward, seconds backward), and what they take in all."""
    total = sum(forward + backward for _, forward, backward in layers)
    return total, models.Model("made", 1.0, tuple(
        models.Layer("layer%d" % number, (models.Tensor("weight", (round(megabytes * 250_000),)),),
                     forward / total, backward / total)
        for number, (megabytes, forward, backward) in enumerate(layers)
    ))  # fmt: skip


def test_with_clipping_the_first_use_waits_for_the_pushes_of_all_layers():
    # On each NIC half of 6.008 MB is pushed, in 3.004 s, in which only the first layer's backward step is computed; and
    # its 4 kB come back. From then on a worker computes for 4 + 1 + 1.5 s.
    compute_s, model = timed((0.008, 4, 0.5), (6, 1, 1.5))
    assert seconds(model, compute_s, one_of_each(2, MB_PER_S), clips=True) == pytest.approx(3.008 + 6.5)
    # Without, the forward step of the first layer hides the second one's values, which take less.
    assert seconds(model, compute_s, one_of_each(2, MB_PER_S)) == pytest.approx(6.008 + 2.5)


def test_with_clipping_a_window_may_end_with_another_layer_than_it_began_with():
    # Half of all 7.008 MB pushed before the first use, and half of the first 3.008 broadcast before the second layer's.
    compute_s, model = timed((0.008, 0.5, 0.5), (3, 2.5, 1), (4, 1, 1))
    result = bound(model, compute_s, one_of_each(2, MB_PER_S), 1000, NO_OVERHEAD, clips=True)
    assert result.seconds == pytest.approx(3.504 + 1.504 + 2.5 + 1 + 1)
    assert "between the gradient of 'layer2' and the next use of 'layer1', for which the norm" in result.reason
    assert "7.01 MB" in result.reason and "3.01 MB" in result.reason and "4.5000 s" in result.reason


def test_clipping_never_lowers_the_bound_and_of_one_layer_changes_nothing():
    for hosts in (1, 2, 4):
        for layers in ([(3, 1)], [(3, 1), (0.1, 9)], [(0.008, 3), (5, 1)], [(0.008, 1), (2, 1), (0.004, 8)]):
            for release in models.RELEASES:
                plain, clipped = (
                    seconds(model_of(*layers), 2.0, one_of_each(hosts, MB_PER_S), release=release, clips=clips)
                    for clips in (False, True)
                )
                assert clipped >= plain and (len(layers) > 1 or clipped == plain)


def test_with_clipping_the_norm_of_a_remote_push_comes_back():
    # The first layer's slice stays on host 0, where its server and the only worker are; the second one's does not.
    cluster = Cluster([MB_PER_S] * 2, [MB_PER_S] * 2, workers=[0], servers=[0, 1])
    model = model_of((0.000004, 9), (0.000004, 1))
    delayed = [seconds(model, 2.0, cluster, delay_s=5.0, clips=clips) for clips in (False, True)]
    # It has the first layer's backward pass, 1.2 s, to hide behind, and without clipping its forward pass.
    assert delayed == pytest.approx([2.0 - 1.8 + 10.0, 2.0 - 1.2 + 10.0], abs=1e-5)


def test_with_clipping_layers_without_weights_need_no_norm():
    model = model_of((3, 1), (0.008, 1))
    empty = models.Layer("shift", (), 0.5, 0.0)
    layers = tuple(one._replace(forward=one.forward / 2, backward=one.backward / 2) for one in model.layers)
    shifted = model._replace(layers=(empty, *layers))
    # Half of the computation hides the transfer that nothing hid.
    rest = seconds(model, 1.0, one_of_each(2, MB_PER_S), clips=True)
    assert seconds(shifted, 2.0, one_of_each(2, MB_PER_S), clips=True) == pytest.approx(max(rest, 2.0))


def test_unlimited_network_leaves_the_computation():
    result = bound(model_of((3, 1), (5, 2)), 2.0, one_of_each(2, float("inf")))
    assert result.seconds == pytest.approx(2.0)
    assert "the computation is the limit" in result.explain()


def test_no_computation_leaves_the_bytes():
    assert seconds(model_of((3, 1), (5, 2)), 0.0, one_of_each(2, MB_PER_S)) == pytest.approx(8.0)


def test_single_host_needs_no_network():
    assert seconds(model_of((3, 1)), 2.0, one_of_each(1, MB_PER_S)) == pytest.approx(2.0)
    assert seconds(model_of((3, 1)), 2.0, one_of_each(1, MB_PER_S), delay_s=1.0) == pytest.approx(2.0)


def test_four_hosts_send_one_and_a_half_times_the_model():
    # Three quarters of it pushed to the others, and a quarter broadcast to each of three.
    assert seconds(model_of((4, 1)), 2.0, one_of_each(4, MB_PER_S)) == pytest.approx(2.0 + 6.0)


def test_server_on_a_host_of_its_own_takes_in_the_model_from_every_worker():
    cluster = Cluster([MB_PER_S] * 3, [MB_PER_S] * 3, workers=[0, 1], servers=[2])
    assert seconds(model_of((3, 1)), 2.0, cluster) == pytest.approx(2.0 + 6.0)


def test_slow_nic_counts_by_direction():
    # Host 1 sends at a quarter of the rate: 3 MB in 12 s, and that holds up every round.
    cluster = Cluster([MB_PER_S, MB_PER_S / 4], [MB_PER_S] * 2, [0, 1], [0, 1])
    result = bound(model_of((3, 1)), 0.0, cluster, 1000, NO_OVERHEAD)
    assert result.seconds == pytest.approx(12.0)
    assert "host 1's NIC, up" in result.explain()


def test_single_slice_goes_there_and_back_whole():
    assert seconds(model_of((1, 1)), 2.0, one_of_each(2, MB_PER_S), elements=250_000) == pytest.approx(2.0 + 2.0)


def test_delay_counts_both_ways_for_a_value_that_is_waited_for():
    assert seconds(model_of((0.000004, 1)), 2.0, one_of_each(2, MB_PER_S), delay_s=0.1) == pytest.approx(2.2, abs=1e-5)


def test_headers_count_for_each_slice_and_packet():
    # 250 slices of 4000 bytes; each with 100 bytes of header and 1/10 for packets.
    overhead = Overhead(slice_bytes=100, packet_bytes=100, packet_payload_bytes=1000)
    result = seconds(model_of((1, 1)), 0.0, one_of_each(2, MB_PER_S), overhead=overhead)
    assert result == pytest.approx(250 * 4100 * 1.1 / 1e6)


def test_compressed_slices_have_their_own_bytes_and_vectors_do_not():
    tensors = (models.Tensor("weight", (1000, 20)), models.Tensor("bias", (20,)))
    model = models.Model("made", 1.0, (models.Layer("layer", tensors, 1 / 3, 2 / 3),))
    cluster = one_of_each(4, MB_PER_S)
    plain, sparse = 80 + 4 * 10_000, 80 + 4 + 6 * 100
    # Three of four hosts push each slice over the network, and three get it back.
    assert bounds.card_bytes(model, cluster, 10_000) == pytest.approx(6 * (2 * plain + 80 + 4 * 20) / 4)
    touched = round(10_000 * (1 - 0.99**4))
    assert touched == 394  # of 400, if no two workers chose the same
    sent = 6 * (80 + 4 * 20) + 2 * 3 * (sparse + 80 + 4 + 6 * touched)
    assert bounds.card_bytes(model, cluster, 10_000, compression=Compression.of("dgc:0.01")) == pytest.approx(sent / 4)
    many = bounds.card_bytes(model, cluster, 10_000, compression=Compression.of("dgc:0.9"))
    assert many == bounds.card_bytes(model, cluster, 10_000)
    # The bound takes all workers to send the same elements: host 0 pushes two slices, and sends the third to three.
    compression = Compression.of("dgc:0.01")
    alike = seconds(model, 0.0, cluster, 10_000, overhead=bounds.FRAMES_ALONE, compression=compression)
    assert alike == pytest.approx((sparse + 80 + 4 * 20 + 3 * sparse) / 1e6)


def test_explanation_names_the_layer_and_what_is_waited_for():
    text = bound(model_of((3, 1), (0.1, 9)), 2.0, one_of_each(2, MB_PER_S), 1000, NO_OVERHEAD).explain()
    assert "'layer0'" in text and "3 MB" in text and "5.0000 s" in text


@pytest.mark.parametrize("arguments, words", [
    ((model_of((1, 1)), -1.0, one_of_each(2, 8)), "compute_s is -1.0"),
    ((model_of((1, 1)), 1.0, one_of_each(2, 0)), "rates must be positive"),
    ((model_of((1, 1)), 1.0, Cluster([8], [8], [0], [1])), "servers on hosts"),
    ((model_of((1, 1)), 1.0, Cluster([8, 8], [8], [0], [0])), "2 rates up and 1 down"),
    ((model_of((1, 1)), 1.0, one_of_each(2, 8), 0), "slice_elements is 0"),
    ((models.Model("empty", 1.0, ()), 1.0, one_of_each(2, 8)), "no layers"),
    ((model_of((1, 1)), 1.0, one_of_each(2, 8), 1, NO_OVERHEAD, 0.0, "late"), "release is 'late'; it must be one of"),
])
def test_what_cannot_be_is_refused(arguments, words):
    with pytest.raises(ValueError, match=words):
        bound(*arguments)


@pytest.mark.parametrize("clips", [False, True], ids=["plain", "clipped"])
@pytest.mark.parametrize("release", models.RELEASES)
@pytest.mark.parametrize("seed", range(150))
def test_ideal_schedule_is_never_faster(seed, release, clips):
    generator = random.Random(seed)

    def rates():
        return [generator.choice([4.0, 8.0, 8.0, 32.0]) for _ in range(hosts)]

    def places(most):
        return [generator.randrange(hosts) for _ in range(generator.randint(1, most))]

    hosts = generator.randint(1, 4)
    cluster = one_of_each(hosts, 8.0)
    if seed % 3:
        cluster = Cluster(rates(), rates(), places(4), places(4))
    layers = [(generator.choice([0.0004, 0.02, 0.5]), generator.random()) for _ in range(generator.randint(1, 6))]
    compute_s = generator.choice([0.0, 0.3, 1.0])
    elements = generator.choice([5000, 40000, "auto"])
    settings = dict(overhead=Overhead(), delay_s=generator.choice([0.0, 0.05]), release=release, clips=clips)
    slice_size = SliceSize(elements, len(cluster.servers))
    ends = ends_of_iterations(model_of(*layers), compute_s, cluster, 8, slice_size, **settings)
    least = bound(model_of(*layers), compute_s, cluster, elements, **settings)
    for number, end in enumerate(ends):
        assert end >= compute_s + number * least.seconds - 1e-9, (seed, number, least.explain())


@pytest.mark.parametrize("name, hosts, within", [
    ("vgg19", 2, 1.01), ("resnet50", 2, 1.01), ("inception_v3", 2, 1.01), ("sockeye", 2, 1.01), ("bert", 2, 1.01),
    ("vgg19", 4, 1.01), ("resnet50", 4, 1.01), ("inception_v3", 4, 1.01), ("sockeye", 4, 1.01), ("bert", 4, 1.01),
])  # fmt: skip
@pytest.mark.parametrize("clips", [False, True], ids=["plain", "clipped"])
@pytest.mark.parametrize("release", models.RELEASES)
def test_ideal_schedule_comes_near(name, hosts, within, release, clips):
    model, cluster, how = models.load(name), one_of_each(hosts, 200), {"release": release, "clips": clips}
    ends = ends_of_iterations(model, 4.0, cluster, 5, SliceSize("auto", hosts), Overhead(), **how)
    period = (ends[-1] - ends[2]) / (len(ends) - 3)
    assert period <= within * bound(model, 4.0, cluster, **how).seconds


def test_command_prints_seconds_and_reason(capsys):
    assert bounds.main(["--model", "sockeye", "--rate", "200", "--compute", "4"]) == 0
    out = capsys.readouterr().out
    assert "73.0 MB, emulated computation: at least 5." in out and "must be pushed and broadcast" in out


def test_tables_of_the_documentation_are_what_the_code_gives():
    page = (ROOT / "docs" / "replay.md").read_text(encoding="utf-8")

    def rows(name):
        table = page.partition("<!-- %s -->" % name)[2].partition("<!-- /%s -->" % name)[0]
        return [[cell.strip() for cell in line.strip("|").split("|")] for line in table.split("\n")[3:-1]]

    names = ["`%s`" % name for name in models.NAMES]
    assert [row[0] for row in rows("models")] == [row[0] for row in rows("bounds")] == names
    assert [row[0] for row in rows("late bounds")] == names
    for row, name in zip(rows("models"), models.NAMES):
        model = models.load(name)
        heaviest = max(range(len(model.layers)), key=lambda number: model.layers[number].bytes)

        def share(number):
            layer = model.layers[number]
            return 100 * layer.bytes / model.bytes, 100 * (layer.forward + layer.backward)

        number = "%d%s" % (heaviest + 1, "st" if heaviest == 0 else "th")
        assert row[1:] == [
            "%.1f MB" % (models.load(name, 1.0).bytes / 1e6), "%g" % model.size, "%.1f MB" % (model.bytes / 1e6),
            "%d, %d" % (len(model.layers), len(model.tensors)),
            "`%s`, the %s: %.0f%%, %.1f%%" % (model.layers[heaviest].name, number, *share(heaviest)),
            "%.1f%%, %.1f%%" % share(0),
        ]
    for row, name in zip(rows("bounds"), models.NAMES):
        model = models.load(name)
        slow = bound(model, 4.0, one_of_each(2, 200))
        assert row[1:5] == ["%.3f" % one for one in (
            slow.seconds,
            bound(model, 4.0, one_of_each(2, 200), overhead=NO_OVERHEAD).seconds,
            bound(model, 1.0, one_of_each(2, 800)).seconds,
            bound(model, 4.0, one_of_each(4, 200)).seconds,
        )]
        found = re.fullmatch(r"the layers up to `(\w+)`: ([\d.]+) MB in ([\d.]+) s", row[5])
        if found:
            layer, megabytes, transfer_s = found.groups()
            assert "gradient of '%s'" % layer in slow.reason and "%.3g MB" % float(megabytes) in slow.reason
            assert "%.2f" % float(re.search(r"takes ([\d.]+) s", slow.reason).group(1)) == transfer_s
        else:
            assert row[5] == "computation" and slow.seconds < 1.001 * slow.compute_s
    for row, name in zip(rows("late bounds"), models.NAMES):
        model, late = models.load(name), []
        for compute_s, hosts, rate in ((4.0, 2, 200), (1.0, 2, 800), (4.0, 4, 200)):
            cluster = one_of_each(hosts, rate)
            late.append(bound(model, compute_s, cluster, release="end").seconds)
            late.append(late[-1] / bound(model, compute_s, cluster).seconds)
        assert row[1:] == ["%.3f, %.2fx" % pair for pair in zip(late[::2], late[1::2])]


PUSHED = {
    "fp16": 4 + 20_000, "2bit": 2500, "1bit": 8 + 1250, "bf16": 20_000, "int8": 79 * 2 + 10_000, "int4": 157 * 2 + 5000,
    "topk": 4 + 100 + 100 + 18,
}  # fmt: skip


@pytest.mark.parametrize("kind, pushed", PUSHED.items())
def test_encoded_pushes_are_shorter_and_broadcasts_are_whole(kind, pushed):
    matrix = models.Tensor("weight", (100, 100))  # one slice; of one dimension, topk would be as if there were none
    model = models.Model("made", 1.0, (models.Layer("layer", (matrix,), 1 / 3, 2 / 3),))
    cluster = one_of_each(2, MB_PER_S)
    sent = 80 + pushed + 80 + 40_000
    compression = Compression(kind, "exact")
    assert bounds.card_bytes(model, cluster, 10_000, compression=compression) == pytest.approx(sent / 2)
    # It goes to the server on the other host, and comes back.
    least = seconds(model, 0.0, cluster, 10_000, overhead=bounds.FRAMES_ALONE, compression=compression)
    assert least == pytest.approx(sent / 1e6)


INT8, INT4 = 20_000 + 157 * 2, 10_000 + 313 * 2  # blocks of 128 and of 64 elements, with a bfloat16 each
TOPK = 4 + 200 + 200 + 35  # a scale and a base; codes of 8 bits, low bytes, 200 high bits and one for each 256 elements


@pytest.mark.parametrize("text, pushed, back", [
    ("fp16", 4 + 40_000, 4 + 40_000), ("int8", INT8, INT8), ("int8-bf16", INT8, 40_000), ("exact-int8", 80_000, INT8),
    ("int4", INT4, INT4), ("topk:0.01-int4", TOPK, INT4), ("2bit-exact", 5000, 80_000), ("1bit", 8 + 2500, 8 + 2500),
])  # fmt: skip
def test_bytes_both_ways_are_those_of_each_codec(text, pushed, back):
    """A matrix of 20,000 elements, and a vector of 100, which comes back whole."""
    tensors = (models.Tensor("weight", (100, 200)), models.Tensor("bias", (100,)))
    model = models.Model("made", 1.0, (models.Layer("layer", tensors, 1 / 3, 2 / 3),))
    compression = Compression.of(text)
    of_vector = {"fp16": 204, "int8": 102, "int4": 54, "2bit": 28, "1bit": 8 + 13}.get(compression.up, 400)
    sent = 80 + pushed + 80 + back + 80 + of_vector + 80 + 400
    found = bounds.card_bytes(model, one_of_each(2, MB_PER_S), 50_000, compression=compression)
    assert found == sent / 2
    wire = 1 + 66 / 1448
    least = bound(model, 0.0, one_of_each(2, MB_PER_S), 50_000, compression=compression).seconds
    assert least >= (80 + pushed + 80 + back) * wire / 1e6 * (1 - 1e-6)


def test_of_a_matrix_of_low_rank_two_thin_ones_cross_the_network():
    tensors = (models.Tensor("weight", (100, 200)), models.Tensor("bias", (100,)))
    model = models.Model("made", 1.0, (models.Layer("layer", tensors, 1 / 3, 2 / 3),))
    compression = Compression.of("lowrank:4")
    sent = 2 * (4 * 4 * 100 + 4 * 4 * 200 + 400 + 3 * 80)
    assert bounds.card_bytes(model, one_of_each(2, MB_PER_S), 50_000, compression=compression) == sent / 2
    wire = 1 + 66 / 1448
    least = bound(model, 0.0, one_of_each(2, MB_PER_S), 50_000, compression=compression).seconds
    assert 2 * (4 * 4 * 200 + 80) * wire / 1e6 <= least <= sent * wire / 1e6
