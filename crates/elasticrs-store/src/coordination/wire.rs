//! Frames and fields, the building blocks of the protocol's messages.
//!
//! A frame consists of a length (u32) and that number of bytes. The first of these bytes is the kind. All numbers are
//! little-endian. A string consists of a length (u16) and UTF-8; a blob consists of a length (u32) and bytes.
//!
//! - **WIRE-1** memory is allocated only as bytes arrive, regardless of the length that the peer announces;
//! - **WIRE-2** extra bytes in a frame are an error.

use std::sync::Arc;

pub use crate::session::network::MAGIC;
pub use crate::types::{MAX_ANSWER, MAX_REQUEST};

/// Maximum frame length before the peer is authenticated, in bytes.
pub(crate) const MAX_UNPROVEN: usize = 1024;
/// Maximum number of store IDs in a list: a store's own ID and those of the stores whose state it restored.
pub(crate) const MAX_IDS: usize = 64;

/// Error for bytes that are not a valid message of this protocol.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct Malformed(pub &'static str);

/// Reads fields from the front of a slice.
#[derive(Debug, Clone, Copy)]
pub(super) struct Cursor<'a> {
    rest: &'a [u8],
}

impl<'a> Cursor<'a> {
    pub(super) fn new(bytes: &'a [u8]) -> Self {
        Self { rest: bytes }
    }

    fn take(&mut self, length: usize) -> Result<&'a [u8], Malformed> {
        let (taken, rest) = self.rest.split_at_checked(length).ok_or(Malformed("a field ends beyond its frame"))?;
        self.rest = rest;
        Ok(taken)
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N], Malformed> {
        let mut array = [0; N];
        array.copy_from_slice(self.take(N)?);
        Ok(array)
    }

    pub(super) fn u8(&mut self) -> Result<u8, Malformed> {
        Ok(self.array::<1>()?[0])
    }

    /// Reads a string of at most `max` bytes.
    pub(super) fn text(&mut self, max: usize) -> Result<&'a str, Malformed> {
        let length = usize::from(u16::read(self)?);
        if length > max {
            return Err(Malformed("a text is too long"));
        }
        str::from_utf8(self.take(length)?).map_err(|_| Malformed("a text is not UTF-8"))
    }

    /// Reads a blob, which may be as long as the rest of the frame.
    fn blob(&mut self) -> Result<&'a [u8], Malformed> {
        let length = u32::read(self)?;
        self.take(usize::try_from(length).map_err(|_| Malformed("a field ends beyond its frame"))?)
    }

    /// Decodes a frame that must contain exactly one value of type `T`.
    pub(super) fn whole<T: Field>(frame: &'a [u8]) -> Result<T, Malformed> {
        let mut cursor = Self::new(frame);
        let message = T::read(&mut cursor)?;
        if cursor.rest.is_empty() { Ok(message) } else { Err(Malformed("a frame is longer than its message")) }
    }
}

/// Writes one frame.
#[derive(Debug)]
pub(super) struct Writer {
    bytes: Vec<u8>,
}

impl Writer {
    /// Encodes a frame with its length.
    pub(super) fn frame(message: impl FnOnce(&mut Self)) -> Vec<u8> {
        let mut writer = Self { bytes: Vec::with_capacity(64) };
        writer.raw(&[0; 4]);
        message(&mut writer);
        writer.finish()
    }

    fn raw(&mut self, bytes: &[u8]) {
        self.bytes.extend_from_slice(bytes);
    }

    pub(super) fn u8(&mut self, value: u8) {
        self.bytes.push(value);
    }

    /// Writes a count or a length as a `u32`. It always fits, because the limits for requests and answers are much
    /// lower.
    fn count(&mut self, count: usize) {
        u32::try_from(count).unwrap_or(u32::MAX).write(self);
    }

    /// Writes a string, truncated to at most 65,535 bytes. Callers never pass a longer one.
    pub(super) fn text(&mut self, text: &str) {
        let mut end = text.len().min(usize::from(u16::MAX));
        while !text.is_char_boundary(end) {
            end -= 1;
        }
        u16::try_from(end).unwrap_or(u16::MAX).write(self);
        self.raw(&text.as_bytes()[..end]);
    }

    fn blob(&mut self, bytes: &[u8]) {
        self.count(bytes.len());
        self.raw(bytes);
    }

    pub(super) fn list<'a, T: Field + 'a>(&mut self, items: impl ExactSizeIterator<Item = &'a T>) {
        self.count(items.len());
        items.for_each(|item| item.write(self));
    }

    fn finish(mut self) -> Vec<u8> {
        let length = u32::try_from(self.bytes.len() - 4).unwrap_or(u32::MAX);
        self.bytes[..4].copy_from_slice(&length.to_le_bytes());
        // Free the spare capacity, because the frame may stay in memory until a slow peer reads it.
        if self.bytes.capacity() - self.bytes.len() > MAX_IDLE {
            self.bytes.shrink_to_fit();
        }
        self.bytes
    }
}

/// A type that can be encoded in a message. Encoding and decoding are in one trait, so that the code for each
/// type stays together.
pub(super) trait Field: Sized {
    /// Maximum number of elements in a list of this type.
    const MOST: usize = usize::MAX;

    fn read(c: &mut Cursor<'_>) -> Result<Self, Malformed>;

    fn write(&self, w: &mut Writer);
}

/// Implements [`Field`] for a struct. The fields are listed in wire order.
macro_rules! record {
    ($name:ident { $($field:ident),* }) => {
        impl Field for $name {
            fn read(c: &mut Cursor<'_>) -> Result<Self, Malformed> {
                $(let $field = Field::read(c)?;)*
                Ok(Self { $($field),* })
            }

            fn write(&self, w: &mut Writer) {
                $(self.$field.write(w);)*
            }
        }
    };
}

/// Implements [`Field`] for an enum. A variant is encoded as a byte that identifies it, followed by its fields in
/// the listed order.
macro_rules! kinds {
    ($name:ident $((at most $most:expr))?, $unknown:literal;
     $($kind:tt => $variant:ident $(($($part:ident),*))? $({ $($field:ident),* })?,)*) => {
        impl Field for $name {
            $(const MOST: usize = $most;)?

            fn read(c: &mut Cursor<'_>) -> Result<Self, Malformed> {
                match c.u8()? {
                    $($kind => {
                        $($(let $part = Field::read(c)?;)*)?
                        $($(let $field = Field::read(c)?;)*)?
                        Ok(Self::$variant $(($($part),*))? $({ $($field),* })?)
                    })*
                    _ => Err(Malformed($unknown)),
                }
            }

            fn write(&self, w: &mut Writer) {
                match self {
                    $(Self::$variant $(($($part),*))? $({ $($field),* })? => {
                        w.u8($kind);
                        $($($part.write(w);)*)?
                        $($($field.write(w);)*)?
                    })*
                }
            }
        }
    };
}

/// Implements [`Field`] for string types, each with its maximum length in bytes.
macro_rules! texts {
    ($($text:ty: $most:expr),*) => {
        $(impl Field for $text {
            fn read(c: &mut Cursor<'_>) -> Result<Self, Malformed> {
                c.text($most).map(Self::from)
            }

            fn write(&self, w: &mut Writer) {
                w.text(self);
            }
        })*
    };
}

pub(super) use {kinds, record, texts};

macro_rules! numbers {
    ($($number:ty),*) => {
        $(impl Field for $number {
            fn read(c: &mut Cursor<'_>) -> Result<Self, Malformed> {
                c.array().map(Self::from_le_bytes)
            }

            fn write(&self, w: &mut Writer) {
                w.raw(&self.to_le_bytes());
            }
        })*
    };
}

numbers!(u16, u32, u64);

macro_rules! blobs {
    ($($blob:ty),*) => {
        $(impl Field for $blob {
            fn read(c: &mut Cursor<'_>) -> Result<Self, Malformed> {
                c.blob().map(Self::from)
            }

            fn write(&self, w: &mut Writer) {
                w.blob(self);
            }
        })*
    };
}

blobs!(Vec<u8>, Arc<[u8]>);

/// A boolean is one byte: 0 or 1.
impl Field for bool {
    fn read(c: &mut Cursor<'_>) -> Result<Self, Malformed> {
        match c.u8()? {
            0 => Ok(false),
            1 => Ok(true),
            _ => Err(Malformed("a truth value is neither 0 nor 1")),
        }
    }

    fn write(&self, w: &mut Writer) {
        w.u8(u8::from(*self));
    }
}

impl<const N: usize> Field for [u8; N] {
    const MOST: usize = MAX_IDS;

    fn read(c: &mut Cursor<'_>) -> Result<Self, Malformed> {
        c.array()
    }

    fn write(&self, w: &mut Writer) {
        w.raw(self);
    }
}

impl<A: Field, B: Field> Field for (A, B) {
    fn read(c: &mut Cursor<'_>) -> Result<Self, Malformed> {
        Ok((A::read(c)?, B::read(c)?))
    }

    fn write(&self, w: &mut Writer) {
        self.0.write(w);
        self.1.write(w);
    }
}

impl<T: Field> Field for Option<T> {
    fn read(c: &mut Cursor<'_>) -> Result<Self, Malformed> {
        bool::read(c)?.then(|| T::read(c)).transpose()
    }

    fn write(&self, w: &mut Writer) {
        self.is_some().write(w);
        if let Some(value) = self {
            value.write(w);
        }
    }
}

/// A list is encoded as its length (u32), followed by its items.
impl<T: Field> Field for Vec<T> {
    fn read(c: &mut Cursor<'_>) -> Result<Self, Malformed> {
        let count = usize::try_from(u32::read(c)?).unwrap_or(usize::MAX);
        // Each item takes at least one byte, so a count larger than the number of remaining bytes is invalid.
        if count > c.rest.len() {
            return Err(Malformed("a list is longer than its frame"));
        }
        if count > T::MOST {
            return Err(Malformed("a list is too long"));
        }
        let mut items = Self::with_capacity(count.min(64));
        for _ in 0..count {
            items.push(T::read(c)?);
        }
        Ok(items)
    }

    fn write(&self, w: &mut Writer) {
        w.list(self.iter());
    }
}

/// Error in the stream of a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Broken {
    /// The stream does not start with [`MAGIC`], so the peer is a different program.
    #[error("this is not the protocol of this store")]
    Foreign,
    /// The length of a frame is zero or exceeds the limit.
    #[error("a message of {0} bytes")]
    Length(usize),
}

/// Spare buffer capacity that is kept instead of being freed, in bytes.
const MAX_IDLE: usize = 4096;

fn length_of(bytes: [u8; 4]) -> usize {
    usize::try_from(u32::from_le_bytes(bytes)).unwrap_or(usize::MAX)
}

/// Splits a byte stream into frames. The bytes can arrive in chunks of any size.
#[derive(Debug)]
pub struct Frames {
    buffer: Vec<u8>,
    start: usize,
    limit: usize,
    is_greeted: bool,
}

impl Frames {
    /// Creates a splitter for a new stream. `limit` is the maximum length of a frame in bytes.
    pub fn new(limit: usize) -> Self {
        Self { buffer: Vec::new(), start: 0, limit, is_greeted: false }
    }

    pub(super) fn set_limit(&mut self, limit: usize) {
        self.limit = limit;
    }

    /// Adds bytes that have arrived.
    pub fn feed(&mut self, bytes: &[u8]) {
        self.rest();
        let needed = self.buffer.len() + bytes.len();
        if needed > self.buffer.capacity() {
            // Double the capacity, but not beyond the end of the current frame.
            let whole = self.buffer.first_chunk().map_or(0, |length| length_of(*length).saturating_add(4));
            let most = (2 * self.buffer.capacity()).min(whole);
            self.buffer.reserve_exact(needed.max(most) - self.buffer.len());
        }
        self.buffer.extend_from_slice(bytes);
    }

    pub(super) fn capacity(&self) -> usize {
        self.buffer.capacity()
    }

    pub(super) fn is_untouched(&self) -> bool {
        !self.is_greeted && self.buffer.is_empty()
    }

    pub(super) fn unread(&self) -> &[u8] {
        &self.buffer[self.start..]
    }

    /// Returns the next complete frame, without its length prefix. Returns `None` if it has not fully arrived yet.
    pub fn cut(&mut self) -> Result<Option<&[u8]>, Broken> {
        if !self.is_greeted {
            let seen = self.buffer.len().min(MAGIC.len());
            if self.buffer[..seen] != MAGIC[..seen] {
                return Err(Broken::Foreign);
            }
            if seen < MAGIC.len() {
                return Ok(None);
            }
            self.is_greeted = true;
            self.start = seen;
        }
        let Some((length, rest)) = self.unread().split_first_chunk::<4>() else { return Ok(None) };
        let length = length_of(*length);
        if length == 0 || length > self.limit {
            return Err(Broken::Length(length));
        }
        if rest.len() < length {
            return Ok(None);
        }
        let begin = self.start + 4;
        self.start = begin + length;
        Ok(Some(&self.buffer[begin..begin + length]))
    }

    /// Drops the frames that were already returned, and shrinks the buffer if most of its capacity is unused.
    pub(super) fn rest(&mut self) {
        self.buffer.drain(..self.start);
        self.start = 0;
        if self.buffer.capacity() > MAX_IDLE.max(4 * self.buffer.len()) {
            self.buffer.shrink_to(2 * self.buffer.len());
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::collection::vec;
    use proptest::prelude::*;

    use super::*;

    fn frames_of(chunks: &[&[u8]], limit: usize) -> Result<Vec<Vec<u8>>, Broken> {
        let mut frames = Frames::new(limit);
        let mut found = Vec::new();
        for chunk in chunks {
            frames.feed(chunk);
            while let Some(frame) = frames.cut()? {
                found.push(frame.to_vec());
            }
        }
        Ok(found)
    }

    #[test]
    fn another_protocol_is_detected_by_its_first_wrong_byte() {
        assert_eq!(frames_of(&[b"G"], 10), Err(Broken::Foreign));
        assert_eq!(frames_of(&[&MAGIC[..4], b"x"], 10), Err(Broken::Foreign));
    }

    #[test]
    fn a_frame_may_be_as_long_as_the_limit() {
        let stream = |length: u32| [&MAGIC[..], &length.to_le_bytes(), &[7; 11]].concat();
        assert_eq!(frames_of(&[&stream(10)], 10), Ok(vec![vec![7; 10]]));
        assert_eq!(frames_of(&[&stream(11)], 10), Err(Broken::Length(11)));
        assert_eq!(frames_of(&[&stream(0)], 10), Err(Broken::Length(0)));
    }

    proptest! {
        #[test]
        fn the_frames_do_not_depend_on_how_the_stream_is_split(bodies in vec(vec(any::<u8>(), 1..50), 0..10), cuts in vec(1..20_usize, 1..40)) {
            let mut stream = MAGIC.to_vec();
            for body in &bodies {
                stream.extend_from_slice(&u32::try_from(body.len()).unwrap().to_le_bytes());
                stream.extend_from_slice(body);
            }
            let mut chunks = Vec::new();
            let mut rest = &stream[..];
            for cut in cuts.into_iter().cycle() {
                if rest.is_empty() { break; }
                let (chunk, left) = rest.split_at(cut.min(rest.len()));
                chunks.push(chunk);
                rest = left;
            }
            prop_assert_eq!(frames_of(&chunks, 100), Ok(bodies));
        }

        #[test]
        fn random_bytes_do_not_cause_a_large_allocation(bytes in vec(any::<u8>(), 0..300), greeted: bool) {
            let mut frames = Frames::new(MAX_ANSWER);
            if greeted { frames.feed(&MAGIC); }
            frames.feed(&bytes);
            while let Ok(Some(_)) = frames.cut() {}
            prop_assert!(frames.buffer.capacity() <= 1024);
        }
    }
}
