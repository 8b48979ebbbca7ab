"""`p3 simulate --timeline`: the picture at the top of README.md."""

import dataclasses
import re
import xml.etree.ElementTree as ElementTree

import pytest
from pages import README
from processes import ROOT

pytest.importorskip("matplotlib", reason="p3 simulate --timeline needs matplotlib: pip install matplotlib")

from p3 import cli
from p3.measure.replay import models
from p3.measure.simulate import plot_timeline
from p3.measure.simulate.predict import predict
from p3.measure.simulate.setting import Setting, links
from p3.measure.simulate.timeline import groups, timeline, timelines

OPTIONS = ["--models", "resnet50", "--size", "0.2", "--compute", "0.9"]
SETTING = Setting(models.load("resnet50", 0.2), 0.9, links(2, 200.0))


def words_of(picture):
    elements = ElementTree.fromstring(picture).iter("{http://www.w3.org/2000/svg}text")
    return "\n".join("".join(element.itertext()) for element in elements)


@pytest.fixture(scope="module")
def drawn():
    return timelines(SETTING)


def test_p3s_iteration_ends_before_that_of_whole_layers(drawn):
    layers, p3 = drawn
    assert (layers.scheme, p3.scheme) == ("layers", "p3")
    assert p3.seconds < 0.9 * layers.seconds and p3.waited_s < 0.5 * layers.waited_s
    assert p3.seconds == pytest.approx(predict(SETTING).mean_s, rel=0.01)


def test_computation_is_whole_and_what_is_left_of_an_iteration_are_waits(drawn):
    for one in drawn:
        computed_s = sum(bar.end_s - bar.begin_s for bar in (*one.backward, *one.forward))
        assert computed_s == pytest.approx(0.9) and one.seconds == pytest.approx(computed_s + one.waited_s)
        assert len(one.backward) == len(one.forward) == len(SETTING.model.layers)
        assert one.backward[0].begin_s == 0 and one.forward[-1].end_s == pytest.approx(one.seconds)


def test_what_clipping_waits_for_counts_as_the_first_layers():
    clipped = timeline(dataclasses.replace(SETTING, clip="wait"))
    computed_s = sum(bar.end_s - bar.begin_s for bar in (*clipped.backward, *clipped.forward))
    assert clipped.seconds == pytest.approx(computed_s + clipped.waited_s) and computed_s == pytest.approx(0.9)
    assert [wait.group for wait in clipped.waits] == [0] and clipped.waited_s > 0


def test_links_carry_all_bytes_of_an_iteration_and_never_two_segments_at_once(drawn):
    # Each host pushes the half of the model that is the other's, and sends the other's workers its own half.
    for one in drawn:
        for bars in (one.sent, one.received):
            carried = sum(bar.end_s - bar.begin_s for bar in bars) * 200e6 / 8
            assert carried == pytest.approx(SETTING.model.bytes * (1 + 66 / 1448), rel=0.05)
            ordered = sorted((bar.begin_s, bar.end_s) for bar in bars)
            assert all(end <= begin + 1e-9 for (_, end), (begin, _) in zip(ordered, ordered[1:]))


def test_first_layers_overtake_in_p3_alone(drawn):
    def share_in_front(one):
        """Of what comes before the forward pass has its first layers: the share of the bytes."""
        end_s = max((wait.end_s for wait in one.waits if wait.group == 0), default=one.forward[0].begin_s)
        return sum(bar.end_s - bar.begin_s for bar in one.received if bar.end_s <= end_s) / sum(
            bar.end_s - bar.begin_s for bar in one.received
        )

    layers, p3 = drawn
    assert share_in_front(layers) > 0.9 and share_in_front(p3) < 0.85


@pytest.mark.parametrize("name", models.NAMES)
def test_groups_are_of_neighbours_and_not_too_many(name):
    found = groups(models.load(name).layers)
    assert found == sorted(found) and set(found) == set(range(found[-1] + 1)) and 4 <= found[-1] + 1 <= 8


def test_command_writes_the_same_two_files_each_time(tmp_path, capsys):
    written = []
    for number in range(2):
        prefix = tmp_path / str(number)
        assert cli.main(["simulate", *OPTIONS, "--timeline", str(prefix)]) == 0
        out = capsys.readouterr().out
        assert f"wrote {prefix}-light.svg and {prefix}-dark.svg" in out
        layers_s, p3_s = map(float, re.findall(r": ([\d.]+) s, of which the forward pass waits", out))
        assert p3_s < layers_s
        written.append([(tmp_path / f"{number}-{theme}.svg").read_bytes() for theme in ("light", "dark")])
    assert written[0] == written[1] and written[0][0] != written[0][1]
    for picture in written[0]:
        for words in (*plot_timeline.TITLES.values(), f"{layers_s:.2f} s", f"{p3_s:.2f} s", "sends", "receives"):
            assert words in words_of(picture)


def test_readme_shows_and_tells_what_is_simulated_now():
    """To bring both pictures up to date: the command in docs/simulator.md."""
    layers, p3 = timelines(Setting(models.load("resnet50"), 4.0, links(2, 200.0)))
    (told,) = re.findall('alt="([^"]+)"', README)
    for theme in ("light", "dark"):
        shown = words_of((ROOT / "docs" / "figures" / f"timeline-{theme}.svg").read_text(encoding="utf-8"))
        for words in (f"waits {layers.waited_s:.2f} s", f"{layers.seconds:.2f} s", f"{p3.seconds:.2f} s"):
            assert words in shown and words in told


@pytest.mark.parametrize("options, words", [
    (["--hosts", "2,4"], "--timeline takes one setting; 2 are given"),
    (["--scheme", "ddp"], "the timelines are those of P3 and of whole layers; the scheme is 'ddp'"),
    (["--timeline", "/nowhere/t"], "/nowhere/t-light.svg: No such file"),
])  # fmt: skip
def test_what_cannot_be_drawn_is_an_error_that_says_so(options, words, tmp_path, capsys):
    assert cli.main(["simulate", *OPTIONS, "--timeline", str(tmp_path / "t"), *options]) == 1
    assert words in capsys.readouterr().err
