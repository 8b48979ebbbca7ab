"""Stores and their compressions: one notation in names, in options and in what workers are given."""

import argparse

import pytest

from p3 import cli, codecs
from p3.measure import compressions
from p3.measure.bench import experiments, limits
from p3.measure.bench.configuration import Course
from p3.measure.compressions import Compression
from p3.measure.jobs import stores

pytest.importorskip("p3._core", reason="the extension is not built")

COURSE = Course(1, 1, 0.0, "sgd", 1, None)


@pytest.mark.parametrize("text, up, down", [
    ("int8", "int8", "int8"), ("int8-bf16", "int8", "bf16"), ("fp16-exact", "fp16", "exact"),
    ("exact-bf16", "exact", "bf16"), ("dgc:0.01", "dgc:0.01", "dgc:0.01"),
])  # fmt: skip
def test_a_compression_is_written_as_it_is_read(text, up, down):
    made = compressions.parse(text)
    assert (made.up, made.down) == (up, down) and str(made) == text


def test_exact_is_no_compression():
    assert compressions.parse("exact") is None and compressions.parse("exact-exact") is None


def test_options_of_a_store_follow():
    assert compressions.parse("int8-bf16").options == {
        "compression": {"type": "int8"}, "value_compression": {"type": "bf16"}
    }  # fmt: skip
    assert compressions.parse("2bit:0.25-exact").of_torch == {"up": {"type": "2bit", "threshold": 0.25}}
    # What comes back of dgc is its own.
    assert compressions.parse("dgc:0.01").options["value_compression"] is None
    assert compressions.parse("dgc:0.01").of_torch["up"]["ratio"] == 0.01
    assert compressions.parse("lowrank:2").of_torch == {"up": {"type": "lowrank", "rank": 2}}
    topk = {"type": "topk", "ratio": 0.01, "value_bits": 8}
    assert compressions.parse("topk:0.01").of_torch == {"up": topk, "down": topk}


@pytest.mark.parametrize("text", [
    "int8", "topk:0.05", "topk:0.05:4", "topk:0.01:2-int8", "2bit:0.5-exact", "dgc:0.01:10:0:0", "exact-bf16",
    "lowrank:2", "topk:0.0000125-exact",
])  # fmt: skip
def test_a_compression_and_what_scripts_say_are_the_same(text):
    made = compressions.parse(text)
    again = Compression.of_ways(made.ways)
    assert again == made and again.ways == made.ways and str(again) == text


def test_values_that_no_option_takes_are_refused():
    for text, words in (("topk:0.1:4:3", "topk has 2 options"), ("topk:0.1:99", "value_bits of topk is 99")):
        with pytest.raises(argparse.ArgumentTypeError, match=words):
            compressions.parse(text)


def test_only_known_codecs_have_a_formula_and_ddp_halves():
    assert [Compression.of(text).is_of_codecs for text in ("fp16", "int8-exact", "powersgd:2", "int8-lzma")] == [
        True, True, False, False
    ]  # fmt: skip
    assert [Compression.of(text).halves_all for text in ("fp16", "bf16", "int8", "fp16-exact")] == [
        True, True, False, False
    ]  # fmt: skip
    assert compressions.parse("int8-bf16").fewest_bits == pytest.approx(8.1, abs=0.1)
    assert compressions.parse("bf16-exact").fewest_bits == 16 and Compression.of("powersgd").fewest_bits == 0


def test_of_a_matrix_of_low_rank_two_thin_ones_travel():
    made = compressions.parse("lowrank:2")
    assert compressions.in_place_of((30, 40), made) == ((30, 2), (40, 2))
    assert compressions.in_place_of((30,), made) == ((30,),) and compressions.in_place_of((30, 40), None) == ((30, 40),)
    assert compressions.of_push((30, 2), 60, made) == compressions.of_broadcast((30, 2), 60, made) == 240
    assert made.is_of_codecs and not made.halves_all and made.fewest_bits == 0 and compressions.adds_up_on_machine(made)


def test_p3_torch_has_a_store_of_low_rank_and_mxnet_none():
    assert "lowrank" in stores.of_torch() and "p3_lowrank" not in stores.of_codecs()
    assert stores.among(["p3_torch"])("p3_torch_lowrank:2") == "p3_torch_lowrank:2"


@pytest.mark.parametrize("text, words", [
    ("int9", "'int9' is no codec: exact, fp16"),
    ("int8-", "'' is no codec"),
    ("dgc:2", "ratio of dgc is 2; it must be a number above 0"),
    ("dgc:x", "'dgc:x' is no codec"),
    ("int8:3", "int8 has no option"),
    ("lowrank:0", "rank of lowrank is 0; it must be a whole number from 1 to 1024"),
    ("exact-lowrank", "value_compression: type is 'lowrank'"),
    ("int8-bf16-fp16", "'bf16-fp16' is no codec"),
    ("int8-dgc:0.1", "value_compression"),
    ("2bit-exact", "threshold is missing"),
])  # fmt: skip
def test_what_is_no_compression_is_refused(text, words):
    with pytest.raises(argparse.ArgumentTypeError, match="compression '%s': " % text) as refused:
        compressions.parse(text)
    assert words in str(refused.value)


@pytest.mark.parametrize("text", ["int8", "fp16:2", "powersgd:0", "powersgd:x", "fp16-bf16", ""])
def test_what_is_no_hook_of_ddp_is_refused(text):
    with pytest.raises(argparse.ArgumentTypeError, match="is none of DDP's hooks"):
        compressions.parse_hook(text)


def test_a_hook_that_ddp_refuses_on_gloo_is_named():
    with pytest.raises(argparse.ArgumentTypeError, match="bf16_compress_hook without NCCL"):
        compressions.parse_hook("bf16")


@pytest.mark.parametrize("name, kvstore, label", [
    ("p3_torch_int8", "p3_torch+int8", "p3.torch, int8"),
    ("p3_torch_int8-bf16", "p3_torch+int8-bf16", "p3.torch, int8-bf16"),
    ("p3_torch_4_fp16", "p3_torch:4+fp16", "p3.torch, 4 steps apart, fp16"),
    ("ddp_25_fp16", "ddp:25+fp16", "DDP, buckets of 25 MB, fp16"),
    ("ddp_100_powersgd:2", "ddp:100+powersgd:2", "DDP, buckets of 100 MB, powersgd:2"),
])  # fmt: skip
def test_stores_of_torch_have_one_more_for_each_compression(name, kvstore, label):
    store = stores.named(name)
    assert (store.name, store.kvstore, store.label) == (name, kvstore, label)
    assert str(store.compression) == kvstore.partition("+")[2]
    plain = stores.named(name.rpartition("_")[0])
    assert plain.compression is None
    same = ("is_p3", "is_torch", "is_ddp", "is_workers_alone", "may_be_apart", "clips", "environment", "group")
    assert [getattr(store, field) for field in same] == [getattr(plain, field) for field in same]


def test_names_of_mxnet_and_of_other_versions_mean_what_they_did():
    assert stores.named("p3_int8").compression == Compression("int8", "exact")
    assert stores.named("p3_dgc_0.01").compression == Compression("dgc:0.01", "exact")
    assert stores.named("p3_torch_4").kvstore == "p3_torch:4" and stores.named("p3_torch_4").compression is None
    assert stores.named("horovod") == stores.Store("horovod", "horovod", "horovod")


def test_compressed_stores_stand_behind_what_they_are_of():
    names = ["p3_torch_int8", "p3_torch", "ddp_25_fp16", "ddp_25", "ddp_5", "p3_torch_bf16", "unknown", "p3_int8"]
    assert sorted(names, key=stores.rank) == [
        "p3_int8", "ddp_5", "ddp_25", "ddp_25_fp16", "p3_torch", "p3_torch_bf16", "p3_torch_int8", "unknown",
    ]  # fmt: skip


def options_of(*arguments):
    return cli.parser().parse_args(["bench", *arguments])


def test_bench_takes_compressed_stores_of_torch_in_turns_with_others():
    names = "ddp_25,ddp_25_fp16,ddp_100,ddp_100_powersgd:2,p3_torch,p3_torch_int8,p3_torch_fp16-exact"
    assert options_of("targets", "--stores", names).stores == names.split(",")


@pytest.mark.parametrize("names, words", [
    ("p3_torch_int9", "'int9' is no codec"),
    ("ddp_25_int8", "'int8' is none of DDP's hooks"),
    ("ddp_0_fp16", "'ddp_0_fp16' is none of"),
    ("ddp_25_bf16", "bf16_compress_hook without NCCL"),
    ("p3_sync_fp16", "with a compression, as "),
    ("p3_torch_int8,p3_torch_int8", "names one twice"),
])  # fmt: skip
def test_what_is_no_store_is_refused(names, words, capsys):
    with pytest.raises(SystemExit):
        options_of("targets", "--stores", names)
    assert words in capsys.readouterr().err


def test_compressed_stores_are_of_the_experiments_that_know_torch(capsys):
    for name in ("p3_torch_int8", "ddp_100"):
        with pytest.raises(SystemExit):
            options_of("accuracy", "--stores", name)
        assert "with a compression" not in capsys.readouterr().err


def test_workers_get_the_compression_of_torch_with_the_store_and_mxnets_as_an_option():
    options = options_of("targets", "--models", "vgg19", "--regimes", "slow")
    (first,) = experiments.named("targets").configurations(options)

    def command(name):
        return experiments.named("targets").computation.command(stores.named(name), first, COURSE, 0)

    torch = command("p3_torch_int8")
    assert torch[torch.index("--store") + 1] == "p3_torch+int8" and "--compression" not in torch
    assert command("p3_int8")[-2:] == ["--compression", "int8"] and command("p3_dgc_0.01")[-2:] == ["--dgc", "0.01"]


def test_regimes_may_be_told_by_rate_and_seconds(capsys):
    options = options_of("targets", "--models", "vgg19", "--regimes", "fast,50mbit/1s,1.5gbit/0.25s")
    found = experiments.named("targets").configurations(options)
    assert [(one.label, one.rate_mbit, one.compute_s) for one in found] == [
        ("fast", 800, 1.0), ("50mbit/1s", 50, 1.0), ("1.5gbit/0.25s", 1500, 0.25)
    ]  # fmt: skip
    refused = {"quick": "is none of slow, fast", "100mbit/1": "as 100mbit/1s", "1/1s": "is not a rate"}
    for text, words in refused.items():
        with pytest.raises(SystemExit):
            options_of("targets", "--regimes", text)
        assert words in capsys.readouterr().err


def test_the_bound_counts_what_a_store_sends_and_is_unknown_without_a_formula():
    options = options_of("targets", "--models", "vgg19", "--regimes", "100mbit/1s")
    (first,) = experiments.named("targets").configurations(options)

    def limit(name):
        return limits.goal(first, stores.named(name).compression)

    plain, half = limit("p3_torch").seconds, limit("p3_torch_fp16").seconds
    assert half == pytest.approx(plain / 2, rel=0.01)
    assert limit("ddp_25_fp16").seconds == half and limit("p3_torch_bf16").seconds == pytest.approx(half, rel=0.001)
    assert limit("p3_torch_fp16-exact").seconds == pytest.approx(0.75 * plain, rel=0.01)
    assert limit("ddp_25_powersgd") is None and limits.card_bytes(stores.named("ddp_25_powersgd"), first) is None
    assert "no codec of P3's is powersgd" in limits.why_unknown(first, stores.named("ddp_25_powersgd").compression)


def test_codecs_trains_with_each_for_any_optimizer_and_a_seed_for_each_repeat():
    options = options_of("codecs")
    known = [*(name for name in (*codecs.of_gradients(), "lowrank") if name != "2bit"), "2bit:0.001"]
    assert [name for name in options.stores if name.startswith("p3_torch_")] == ["p3_torch_" + one for one in known]
    assert {"ddp_1", "p3_torch", "ddp_1_fp16", "ddp_25_powersgd"} < set(options.stores)
    options.rate = [200.0]
    gpt, convnet, words = experiments.named("codecs").configurations(options)
    assert (gpt.clip, convnet.clip, words.clip, gpt.computation) == (1.0, None, None, "real")
    command = experiments.named("codecs").computation.command(stores.named("p3_torch_int8"), gpt, COURSE, 2)
    assert command[-2:] == ["--seed", "2"] and command[command.index("--clip") + 1] == "1.0"
    agreement = experiments.named("codecs").agreement
    assert agreement(gpt, 0, stores.named("ddp_1")) == agreement(gpt, 0, stores.named("p3_torch"))
    assert agreement(gpt, 0, stores.named("ddp_1_fp16")) != agreement(gpt, 0, stores.named("p3_torch_fp16"))


def test_local_steps_have_any_number_of_steps_and_an_outer_momentum():
    known = ["p3_torch", "p3_local_30"]
    assert stores.among(known)("p3_local_500:0_topk:0.01") == "p3_local_500:0_topk:0.01"
    one = stores.named("p3_local_500:0_topk:0.01")
    assert one.kvstore == "p3_local:500:0+topk:0.01" and one.is_p3 and one.is_torch and not one.trains_exactly
    assert (one.every, one.outer_momentum, str(one.compression)) == (500, "0", "topk:0.01")
    assert (stores.named("p3_local_30").every, stores.named("p3_local_30").outer_momentum) == (30, None)
    in_order = ["p3_torch", "p3_local_7", "p3_local_30", "p3_local_30_int4", "p3_local_30:0.5", "p3_local_100"]
    assert sorted({*in_order}, key=stores.rank) == in_order


@pytest.mark.parametrize("name", ["p3_local_0", "p3_local_30:1", "p3_local_30:2", "p3_local_x", "p3_local_30_int9"])
def test_local_steps_that_there_are_not_are_refused(name):
    with pytest.raises(argparse.ArgumentTypeError, match="p3_local_500|is no codec"):
        stores.among(["p3_torch", "p3_local_30"])(name)


def test_experiments_without_local_steps_take_none():
    with pytest.raises(argparse.ArgumentTypeError):
        stores.among(["p3_torch"])("p3_local_30")
