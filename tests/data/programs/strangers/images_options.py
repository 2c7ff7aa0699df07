import argparse


def options():
    parser = argparse.ArgumentParser()
    parser.add_argument("-b", "--batch-size", type=int, default=16)
    parser.add_argument("-vb", "--validation-batch-size", type=int, default=16)
    parser.add_argument("--grad-accum-steps", type=int, default=1)
    parser.add_argument("-j", "--workers", type=int, default=0)
    parser.add_argument("--amp", action=argparse.BooleanOptionalAction, default=True)
    return parser.parse_args()
