"""Makes a manifest agree with files that a test has changed, as their writer would have."""

import hashlib
import json


def seal_again(folder, **changes):
    """Writes the manifest of a checkpoint's folder anew, with the digests of the files that are there now."""
    path = folder / "manifest.json"
    body = json.loads(path.read_text()) | changes
    body.pop("seal", None)
    if "files" not in changes:
        body["files"] = {
            file.name: {"bytes": file.stat().st_size, "sha256": hashlib.sha256(file.read_bytes()).hexdigest()}
            for file in folder.glob("layer-*.safetensors")
        }
    seal = hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
    path.write_text(json.dumps({**body, "seal": seal}, sort_keys=True, indent=1))
