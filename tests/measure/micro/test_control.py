"""`p3 bench control`: real nodes join, agree on all keys, and hear of a loss."""

from p3 import cli


def test_many_nodes_join_agree_and_hear_of_a_loss(capsys):
    assert cli.main(["bench", "control", "--nodes", "6,3", "--model", "vgg19", "--processes", "4"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "vgg19: 38 keys"
    rows = [line.split() for line in lines[2:]]
    assert [row[:3] for row in rows] == [["6", "+", "6"], ["3", "+", "3"]]
    assert all(float(value) >= 0 for row in rows for value in row[3:]) and all(float(row[6]) > 10 for row in rows)
