"""The page of `sfumato serve`: plan, start and watch runs, download results, verify certificates.

It never shows or sends a private image: there is no route that reads a file of the images' folders. What it serves are
certified outputs of runs, whose hashes are compared before they are sent.

Threat model:

- A stranger on the network: the server listens on 127.0.0.1 and asks for a one-time token (`authentication.py`).
- A web page that the same browser visits: requests are refused whose Host or Origin is another one, or that lack the
  token of the session (`authentication.py`).
- A signed-in person: folders lie below a root, options are values of a command and never parts of a shell line
  (`allowed_folders.py`, `run_form.py`), and uploads are unpacked by a process with limits (`uploads.py`).
- A crash: runs are processes of their own, and their state is on disk (`runs.py`).
"""
