//! Parses requests and encodes replies of the workers' store. Pure.
//!
//! The protocol has no frames: a request is an opcode followed by its fields. Integers are little-endian. A key or
//! value consists of a length (`u64`) and its bytes. A list consists of a count (`u64`) and its items.

/// Number that a client sends after the opcode of `VALIDATE`.
pub const MAGIC: u32 = 0x3C85_F7CE;
/// Maximum length of a key, in bytes.
pub const MAX_KEY: u64 = 8192;
/// Maximum length of a value in a request, in bytes.
pub(crate) const MAX_VALUE: u64 = 8 * 1024 * 1024;
/// Maximum number of keys in a request.
pub(crate) const MAX_KEYS: u64 = 131_072;
/// Maximum length of a request or reply, in bytes. Without it, a request with the maximum number of values of
/// maximum length would take a terabyte.
pub const MAX_MESSAGE: usize = 128 * 1024 * 1024;

/// Error for bytes that are not a valid request.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum WireError {
    #[error("not a client of a TCPStore")]
    Stranger,
    #[error("unknown operation {0}")]
    Opcode(u8),
    #[error("a key of {0} bytes (the limit is {MAX_KEY})")]
    Key(u64),
    #[error("a value of {0} bytes (the limit is {MAX_VALUE})")]
    Value(u64),
    #[error("{0} keys in one request (the limit is {MAX_KEYS})")]
    Keys(u64),
    #[error("a request of more than {MAX_MESSAGE} bytes")]
    Long,
}

/// A complete request. It borrows its keys and values from the buffer. The variants are named as in the protocol.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Request<'a> {
    Validate,
    Set { key: &'a [u8], value: &'a [u8] },
    CompareSet { key: &'a [u8], expected: &'a [u8], desired: &'a [u8] },
    Get(&'a [u8]),
    Add { key: &'a [u8], delta: i64 },
    Check(Keys<'a>),
    Wait(Keys<'a>),
    NumKeys,
    Delete(&'a [u8]),
    Append { key: &'a [u8], value: &'a [u8] },
    MultiGet(Keys<'a>),
    MultiSet(Pairs<'a>),
    CancelWait,
    Ping(u32),
    QueuePush { key: &'a [u8], value: &'a [u8] },
    QueuePop(&'a [u8]),
    QueueLen(&'a [u8]),
    ListKeys,
    Barrier { key: &'a [u8], size: i64 },
}

/// The keys of a request, in the order in which they were sent.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Keys<'a>(Fields<'a>);

impl<'a> Iterator for Keys<'a> {
    type Item = &'a [u8];

    fn next(&mut self) -> Option<Self::Item> {
        (!self.0.0.is_empty()).then(|| self.0.bytes())
    }
}

/// The key-value pairs of a request, in the order in which they were sent.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Pairs<'a>(Fields<'a>);

impl<'a> Iterator for Pairs<'a> {
    type Item = (&'a [u8], &'a [u8]);

    fn next(&mut self) -> Option<Self::Item> {
        (!self.0.0.is_empty()).then(|| (self.0.bytes(), self.0.bytes()))
    }
}

#[derive(Debug, Clone, Copy)]
enum Field {
    Key,
    Value,
    Fixed(usize),
}

/// Fields that follow a request's opcode. In a request with a list, an item count comes first, and then the
/// fields once for each item.
#[derive(Debug, Clone, Copy)]
struct Shape {
    fields: &'static [Field],
    is_list: bool,
}

fn shape(opcode: u8) -> Result<Shape, WireError> {
    use Field::{Fixed, Key, Value};
    let fields: &'static [Field] = match opcode {
        0 | 13 => &[Fixed(4)],
        1 | 9 | 11 | 14 => &[Key, Value],
        2 => &[Key, Value, Value],
        3 | 5 | 6 | 8 | 10 | 15 | 16 => &[Key],
        4 | 18 => &[Key, Fixed(8)],
        7 | 12 | 17 => &[],
        _ => return Err(WireError::Opcode(opcode)),
    };
    Ok(Shape { fields, is_list: matches!(opcode, 5 | 6 | 10 | 11) })
}

/// Progress of checking whether the request at the start of a buffer is complete. No byte is checked twice, even if a
/// large request arrives in many small pieces.
#[derive(Debug)]
struct Scan {
    shape: Shape,
    /// Number of items left to check. `None` if the item count has not been read yet.
    left: Option<u64>,
    field: usize,
    at: usize,
}

impl Scan {
    fn new(opcode: u8) -> Result<Self, WireError> {
        let shape = shape(opcode)?;
        let left = if shape.is_list { None } else { Some(u64::from(!shape.fields.is_empty())) };
        Ok(Self { shape, left, field: 0, at: 1 })
    }

    /// Returns true if the request is complete. In that case, `self.at` is its length.
    fn advance(&mut self, buffer: &[u8]) -> Result<bool, WireError> {
        let left = match self.left {
            Some(left) => left,
            None => match number(buffer, self.at) {
                None => return Ok(false),
                Some(count) if count > MAX_KEYS => return Err(WireError::Keys(count)),
                Some(count) => {
                    self.at += 8;
                    count
                }
            },
        };
        self.left = Some(left);
        self.fields(buffer, left)
    }

    fn fields(&mut self, buffer: &[u8], mut left: u64) -> Result<bool, WireError> {
        while left > 0 {
            let Some(length) = self.length(buffer)? else { return Ok(false) };
            if self.at + length > MAX_MESSAGE {
                return Err(WireError::Long);
            }
            if buffer.len() < self.at + length {
                return Ok(false);
            }
            self.at += length;
            self.field += 1;
            if self.field == self.shape.fields.len() {
                self.field = 0;
                left -= 1;
                self.left = Some(left);
            }
        }
        Ok(true)
    }

    /// Returns the length of the current field in bytes, including its length prefix. Returns `None` if the prefix
    /// has not fully arrived yet.
    fn length(&self, buffer: &[u8]) -> Result<Option<usize>, WireError> {
        let (limit, error): (u64, fn(u64) -> WireError) = match self.shape.fields[self.field] {
            Field::Fixed(length) => return Ok(Some(length)),
            Field::Key => (MAX_KEY, WireError::Key),
            Field::Value => (MAX_VALUE, WireError::Value),
        };
        match number(buffer, self.at) {
            None => Ok(None),
            Some(length) if length > limit => Err(error(length)),
            Some(length) => Ok(Some(8 + usize::try_from(length).expect("checked against a limit of some megabytes"))),
        }
    }
}

fn number(buffer: &[u8], at: usize) -> Option<u64> {
    buffer.get(at..)?.first_chunk().map(|bytes| u64::from_le_bytes(*bytes))
}

/// Splits the bytes of one connection into requests.
#[derive(Debug, Default)]
pub struct Parser {
    is_validated: bool,
    scan: Option<Scan>,
}

impl Parser {
    /// True if the client has sent a valid `VALIDATE` request.
    pub(crate) fn is_validated(&self) -> bool {
        self.is_validated
    }

    /// Returns the request at the start of `buffer`, and its length. Returns `None` if it is incomplete. The next
    /// call must then pass the same bytes, followed by more. Fails if the bytes cannot become a valid request.
    pub fn next<'a>(&mut self, buffer: &'a [u8]) -> Result<Option<(Request<'a>, usize)>, WireError> {
        let Some(&opcode) = buffer.first() else { return Ok(None) };
        if !self.is_validated {
            check_greeting(buffer)?;
        }
        let mut scan = match self.scan.take() {
            Some(scan) => scan,
            None => Scan::new(opcode)?,
        };
        if !scan.advance(buffer)? {
            self.scan = Some(scan);
            return Ok(None);
        }
        let request = decode(opcode, &buffer[1..scan.at])?;
        self.is_validated = true;
        Ok(Some((request, scan.at)))
    }
}

/// Fails if the bytes cannot be the start of a `VALIDATE` request. Does not wait until the request is complete.
fn check_greeting(buffer: &[u8]) -> Result<(), WireError> {
    let magic = MAGIC.to_le_bytes();
    let greeting = [0, magic[0], magic[1], magic[2], magic[3]];
    let known = buffer.len().min(greeting.len());
    if buffer[..known] == greeting[..known] { Ok(()) } else { Err(WireError::Stranger) }
}

fn decode(opcode: u8, body: &[u8]) -> Result<Request<'_>, WireError> {
    let mut fields = Fields(body);
    Ok(match opcode {
        0 if fields.array() == MAGIC.to_le_bytes() => Request::Validate,
        0 => return Err(WireError::Stranger),
        1 => Request::Set { key: fields.bytes(), value: fields.bytes() },
        2 => Request::CompareSet { key: fields.bytes(), expected: fields.bytes(), desired: fields.bytes() },
        3 => Request::Get(fields.bytes()),
        4 => Request::Add { key: fields.bytes(), delta: i64::from_le_bytes(fields.array()) },
        5 => Request::Check(Keys(fields.list())),
        6 => Request::Wait(Keys(fields.list())),
        7 => Request::NumKeys,
        8 => Request::Delete(fields.bytes()),
        9 => Request::Append { key: fields.bytes(), value: fields.bytes() },
        10 => Request::MultiGet(Keys(fields.list())),
        11 => Request::MultiSet(Pairs(fields.list())),
        12 => Request::CancelWait,
        13 => Request::Ping(u32::from_le_bytes(fields.array())),
        14 => Request::QueuePush { key: fields.bytes(), value: fields.bytes() },
        15 => Request::QueuePop(fields.bytes()),
        16 => Request::QueueLen(fields.bytes()),
        17 => Request::ListKeys,
        18 => Request::Barrier { key: fields.bytes(), size: i64::from_le_bytes(fields.array()) },
        _ => return Err(WireError::Opcode(opcode)),
    })
}

/// Reads the fields of a request. The request must be complete.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Fields<'a>(&'a [u8]);

impl<'a> Fields<'a> {
    fn array<const N: usize>(&mut self) -> [u8; N] {
        let (head, rest) = self.0.split_first_chunk().expect("the scan has seen the whole field");
        self.0 = rest;
        *head
    }

    fn bytes(&mut self) -> &'a [u8] {
        let length = usize::try_from(u64::from_le_bytes(self.array())).expect("the scan has checked the length");
        let (head, rest) = self.0.split_at(length);
        self.0 = rest;
        head
    }

    /// Skips the item count of a list, so that only the items are left.
    fn list(mut self) -> Self {
        self.array::<8>();
        self
    }
}

/// Appends the length of the bytes, followed by the bytes.
pub fn put_bytes(out: &mut Vec<u8>, bytes: &[u8]) {
    out.extend_from_slice(&(bytes.len() as u64).to_le_bytes());
    out.extend_from_slice(bytes);
}

/// Appends a signed number.
pub fn put_number(out: &mut Vec<u8>, number: i64) {
    out.extend_from_slice(&number.to_le_bytes());
}

#[cfg(test)]
#[path = "wire_tests.rs"]
mod tests;
