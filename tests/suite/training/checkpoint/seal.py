"""Makes a manifest agree with files that a test has changed, as their writer would have."""

import hashlib
import json


def seal_again(folder, **changes):
    """Writes the manifest of a checkpoint's folder anew, with the digests of the files that are there now."""
    body = json.loads((folder / "manifest.json").read_text())
    body["files"] = {file.name: digests(file.read_bytes()) for file in folder.glob("layer-*.safetensors")}
    write_sealed(folder, body | changes)


def digests(data):
    """Returns what a manifest has of a file."""
    return {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}


def write_sealed(folder, body):
    """Writes the fields of a manifest with their seal."""
    body.pop("seal", None)
    seal = hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
    (folder / "manifest.json").write_text(json.dumps({**body, "seal": seal}, sort_keys=True, indent=1))
