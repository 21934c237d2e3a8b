"""An in-memory file that is drained piece by piece, for libraries that write to a file."""

import io


class StreamBuffer(io.BytesIO):
    """What was written since the last `take`; places count from the beginning of the file."""

    taken = 0

    def tell(self) -> int:
        return self.taken + super().tell()

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        return self.taken + super().seek(offset - self.taken, whence)

    def take(self) -> bytes:
        data = self.getvalue()
        self.taken += len(data)
        super().seek(0)
        self.truncate(0)
        return data
