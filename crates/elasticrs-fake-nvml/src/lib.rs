//! Fake NVML library for tests. It implements the NVML functions that elasticrs calls, and simulates GPUs that a test
//! describes in files.
//!
//! A test puts the library on `LD_LIBRARY_PATH` as `libnvidia-ml.so.1` and sets `FAKE_NVML` to the folder that contains
//! the files. Every call rereads the files, so the test can change them at any time. All files are optional.
//!
//! | file | contents |
//! | --- | --- |
//! | `count` | number of GPUs; 1 by default. The PCI address of GPU N is `00000000:00:0X.0` with X = N + 6 |
//! | `fails` | lines `FUNCTION CODE`: the function returns this code |
//! | `hangs` | lines `FUNCTION N`: the function hangs in its Nth call (counted from 1) and all later calls |
//! | `calls` | FIFO to which the library writes the name of each function that is called |
//! | `events` | FIFO from which the library reads one event per line: `GPU XID`, or `lost` if a GPU is lost |
//! | `gpuN/fieldF` | value of field F; without this file, the field is not supported |
//! | `gpuN/memory` | bytes in use; if a number Q follows, query Q + 1 returns 0 and overwrites the file with `0` |
//! | `gpuN/processes` | lines `PID BYTES`: a process that uses the GPU, and the memory that the process uses |
//! | `gpuN/mig` | 1 if the GPU is divided into MIG slices |
#![allow(non_snake_case)]

use std::collections::HashMap;
use std::env;
use std::ffi::{c_char, c_int, c_uint};
use std::fs::{self, File, OpenOptions};
use std::io::{Read, Write};
use std::os::fd::AsFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::PathBuf;
use std::str::FromStr;
use std::sync::Mutex;
use std::thread;

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

const SUCCESS: c_int = 0;
const INVALID_ARGUMENT: c_int = 2;
const NOT_SUPPORTED: c_int = 3;
const INSUFFICIENT_SIZE: c_int = 7;
const TIMEOUT: c_int = 10;
const GPU_IS_LOST: c_int = 15;
const UNKNOWN: c_int = 999;

const XID_EVENT: u64 = 8;
const RECOVERY_ACTION: c_uint = 230;
const TYPE_UNSIGNED: c_uint = 1;
const TYPE_UNSIGNED_LONG_LONG: c_uint = 3;
const UUID_SIZE: usize = 96;

/// Value of a field, with the layout of `nvmlFieldValue_t`.
#[repr(C)]
pub struct Field {
    number: c_uint,
    scope: c_uint,
    timestamp: i64,
    latency: i64,
    kind: c_uint,
    code: c_int,
    value: u64,
}

/// PCI address of a GPU, with the layout of `nvmlPciInfo_t`.
#[repr(C)]
pub struct Pci {
    legacy: [u8; 16],
    numbers: [c_uint; 5],
    address: [u8; 32],
}

/// A GPU's memory figures, laid out like `nvmlMemory_v2_t`.
#[repr(C)]
pub struct Memory {
    version: c_uint,
    total: u64,
    reserved: u64,
    free: u64,
    used: u64,
}

/// A process that uses a GPU, laid out like `nvmlProcessInfo_t`.
#[repr(C)]
pub struct Process {
    pid: c_uint,
    used: u64,
    gpu_instance: c_uint,
    compute_instance: c_uint,
}

/// GPU event, with the layout of `nvmlEventData_t`.
#[repr(C)]
pub struct Event {
    device: usize,
    kind: u64,
    data: u64,
    gpu_instance: c_uint,
    compute_instance: c_uint,
}

// Check that the sizes are the same as in NVML's C header on 64-bit machines.
const _: () = {
    assert!(size_of::<Field>() == 40 && size_of::<Pci>() == 68 && size_of::<Memory>() == 40);
    assert!(size_of::<Process>() == 24 && size_of::<Event>() == 32);
};

/// The event FIFO, and the bytes read from it that do not yet form a complete line.
static EVENTS: Mutex<Option<(File, Vec<u8>)>> = Mutex::new(None);

/// Content of each GPU's `memory` file, and the number of queries since the content changed. The key is the GPU handle.
///
/// Queries are counted, because the file can specify that the memory becomes free after a number of queries.
static QUERIES: Mutex<Option<HashMap<usize, (String, u64)>>> = Mutex::new(None);

/// Number of calls to each function, keyed by the function's name.
static CALLS: Mutex<Option<HashMap<String, u64>>> = Mutex::new(None);

fn path(name: &str) -> PathBuf {
    PathBuf::from(env::var_os("FAKE_NVML").unwrap_or_default()).join(name)
}

fn text(name: &str) -> Option<String> {
    fs::read_to_string(path(name)).ok()
}

fn number(name: &str) -> Option<u64> {
    text(name)?.trim().parse().ok()
}

fn lines(name: &str) -> Vec<Vec<String>> {
    let text = text(name).unwrap_or_default();
    text.lines().map(|line| line.split_whitespace().map(str::to_owned).collect()).collect()
}

/// Runs at the start of every NVML function. Returns the code that the test chose for the function, or hangs if
/// the test requested a hang.
fn enter(function: &str) -> c_int {
    let calls = CALLS.lock().map_or(0, |mut calls| {
        let calls = calls.get_or_insert_default().entry(function.to_owned()).or_default();
        *calls += 1;
        *calls
    });
    let mut options = OpenOptions::new();
    if let Ok(mut fifo) = options.write(true).custom_flags(libc::O_NONBLOCK).open(path("calls")) {
        // Write the line in one call, because several threads write lines. Ignore a failed write: it means that the
        // test is not reading the FIFO.
        let _ = fifo.write_all(format!("{function}\n").as_bytes());
    }
    if chosen("hangs", function).is_some_and(|first: u64| calls >= first) {
        loop {
            thread::park();
        }
    }
    chosen("fails", function).unwrap_or(SUCCESS)
}

/// Returns the number that a test has chosen for a function of NVML, from a file with lines `FUNCTION NUMBER`. Returns
/// `None` if the file has no line for the function.
fn chosen<N: FromStr>(file: &str, function: &str) -> Option<N> {
    let line = lines(file).into_iter().find(|line| line.first().is_some_and(|name| name == function))?;
    line.get(1)?.parse().ok()
}

/// Fills in the output argument by calling `answer`, and returns the code from `answer`. If the test chose an
/// error code for `function`, returns that code instead.
fn answer<T>(function: &str, out: Option<&mut T>, answer: impl FnOnce(&mut T) -> c_int) -> c_int {
    match (enter(function), out) {
        (SUCCESS, Some(out)) => answer(out),
        (SUCCESS, None) => INVALID_ARGUMENT,
        (code, _) => code,
    }
}

/// Converts a GPU's handle to its number. Handles start at 1, because a handle must not be null.
fn index(device: usize) -> usize {
    device.wrapping_sub(1)
}

fn copy(text: &str, to: &mut [u8]) {
    to.fill(0);
    for (to, byte) in to.iter_mut().zip(text.bytes()) {
        *to = byte;
    }
}

/// Initializes the library.
#[unsafe(no_mangle)]
pub extern "C" fn nvmlInit_v2() -> c_int {
    enter("nvmlInit_v2")
}

/// Returns the description of an error code.
#[unsafe(no_mangle)]
pub extern "C" fn nvmlErrorString(code: c_int) -> *const c_char {
    match code {
        GPU_IS_LOST => c"GPU is lost",
        NOT_SUPPORTED => c"Not Supported",
        _ => c"some error",
    }
    .as_ptr()
}

/// Returns the number of GPUs.
#[unsafe(no_mangle)]
pub extern "C" fn nvmlDeviceGetCount_v2(count: Option<&mut c_uint>) -> c_int {
    answer("nvmlDeviceGetCount_v2", count, |count| {
        *count = number("count").and_then(|count| count.try_into().ok()).unwrap_or(1);
        SUCCESS
    })
}

/// Returns the handle of a GPU.
#[unsafe(no_mangle)]
pub extern "C" fn nvmlDeviceGetHandleByIndex_v2(index: c_uint, device: Option<&mut usize>) -> c_int {
    answer("nvmlDeviceGetHandleByIndex_v2", device, |device| {
        *device = index as usize + 1;
        SUCCESS
    })
}

/// Returns a GPU's UUID.
#[unsafe(no_mangle)]
pub extern "C" fn nvmlDeviceGetUUID(device: usize, uuid: Option<&mut [u8; UUID_SIZE]>, length: c_uint) -> c_int {
    answer("nvmlDeviceGetUUID", uuid, |uuid| {
        if length as usize != UUID_SIZE {
            return INSUFFICIENT_SIZE;
        }
        copy(&format!("GPU-{:08x}-0000-0000-0000-000000000000", index(device)), uuid);
        SUCCESS
    })
}

/// Returns the PCI address of a GPU.
#[unsafe(no_mangle)]
pub extern "C" fn nvmlDeviceGetPciInfo_v3(device: usize, pci: Option<&mut Pci>) -> c_int {
    answer("nvmlDeviceGetPciInfo_v3", pci, |pci| {
        let place = index(device) + 6;
        copy(&format!("0000:00:{place:02X}.0"), &mut pci.legacy);
        copy(&format!("00000000:00:{place:02X}.0"), &mut pci.address);
        pci.numbers = [0; 5];
        SUCCESS
    })
}

/// Fills in the values of the requested fields.
///
/// # Safety
///
/// `fields` must be null or point to an array of `count` fields. No other code may access the array during the call.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetFieldValues(device: usize, count: c_int, fields: *mut Field) -> c_int {
    let code = enter("nvmlDeviceGetFieldValues");
    let Ok(count) = usize::try_from(count) else { return INVALID_ARGUMENT };
    if code != SUCCESS || fields.is_null() {
        return if code == SUCCESS { INVALID_ARGUMENT } else { code };
    }
    // SAFETY: the caller passes an array of `count` fields and does not access the array during the call.
    let fields = unsafe { std::slice::from_raw_parts_mut(fields, count) };
    for field in fields {
        let value = number(&format!("gpu{}/field{}", index(device), field.number));
        field.kind = if field.number == RECOVERY_ACTION { TYPE_UNSIGNED } else { TYPE_UNSIGNED_LONG_LONG };
        field.code = if value.is_some() { SUCCESS } else { NOT_SUPPORTED };
        field.value = value.unwrap_or(0);
    }
    SUCCESS
}

/// Returns the number of bytes in use in a GPU's memory.
#[unsafe(no_mangle)]
pub extern "C" fn nvmlDeviceGetMemoryInfo_v2(device: usize, memory: Option<&mut Memory>) -> c_int {
    answer("nvmlDeviceGetMemoryInfo_v2", memory, |memory| {
        let name = format!("gpu{}/memory", index(device));
        let contents = text(&name).unwrap_or_default();
        let mut words = contents.split_whitespace().map(|word| word.parse().unwrap_or(0));
        let (used, limit) = (words.next().unwrap_or(0), words.next());
        let Ok(mut queries) = QUERIES.lock() else { return UNKNOWN };
        let seen = queries.get_or_insert_default().entry(device).or_default();
        if seen.0 != contents {
            *seen = (contents.clone(), 0);
        }
        seen.1 += 1;
        memory.used = used;
        if limit.is_some_and(|limit| seen.1 > limit) {
            memory.used = 0;
            return fs::write(path(&name), "0\n").map_or(UNKNOWN, |()| SUCCESS);
        }
        SUCCESS
    })
}

/// Returns the processes that use a GPU.
///
/// # Safety
///
/// `processes` must be null or point to an array of `count` processes. No other code may access the array during the
/// call.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetComputeRunningProcesses_v3(
    device: usize,
    count: Option<&mut c_uint>,
    processes: *mut Process,
) -> c_int {
    answer("nvmlDeviceGetComputeRunningProcesses_v3", count, |count| {
        if processes.is_null() {
            return INVALID_ARGUMENT;
        }
        // SAFETY: the caller passes an array of `count` processes and does not access the array during the call.
        let processes = unsafe { std::slice::from_raw_parts_mut(processes, *count as usize) };
        let lines = lines(&format!("gpu{}/processes", index(device)));
        for (process, line) in processes.iter_mut().zip(&lines) {
            let word = |at: usize| line.get(at).and_then(|word| word.parse().ok()).unwrap_or(0_u64);
            process.pid = word(0).try_into().unwrap_or(0);
            process.used = word(1);
        }
        *count = lines.len().try_into().unwrap_or(0);
        SUCCESS
    })
}

/// Reports whether a GPU is divided into MIG slices.
#[unsafe(no_mangle)]
pub extern "C" fn nvmlDeviceGetMigMode(
    device: usize,
    current: Option<&mut c_uint>,
    pending: Option<&mut c_uint>,
) -> c_int {
    let mode = number(&format!("gpu{}/mig", index(device))).and_then(|mode| c_uint::try_from(mode).ok());
    answer("nvmlDeviceGetMigMode", current, |current| match (mode, pending) {
        (Some(mode), Some(pending)) => {
            (*current, *pending) = (mode, mode);
            SUCCESS
        }
        _ => NOT_SUPPORTED,
    })
}

/// Creates a set of events.
#[unsafe(no_mangle)]
pub extern "C" fn nvmlEventSetCreate(events: Option<&mut usize>) -> c_int {
    answer("nvmlEventSetCreate", events, |events| {
        *events = 1;
        SUCCESS
    })
}

/// Adds a GPU's events to the set. Fails if the test has not created the event FIFO.
#[unsafe(no_mangle)]
pub extern "C" fn nvmlDeviceRegisterEvents(_device: usize, _kinds: u64, _events: usize) -> c_int {
    match enter("nvmlDeviceRegisterEvents") {
        SUCCESS if !path("events").exists() => NOT_SUPPORTED,
        code => code,
    }
}

/// Waits for an event.
#[unsafe(no_mangle)]
pub extern "C" fn nvmlEventSetWait_v2(_events: usize, event: Option<&mut Event>, milliseconds: c_uint) -> c_int {
    answer("nvmlEventSetWait_v2", event, |event| {
        let Some(line) = next_line(milliseconds) else { return TIMEOUT };
        if line == "lost" {
            return GPU_IS_LOST;
        }
        let mut words = line.split_whitespace().map(|word| word.parse().unwrap_or(0_u64));
        event.device = words.next().and_then(|gpu| usize::try_from(gpu).ok()).unwrap_or(0) + 1;
        (event.kind, event.data) = (XID_EVENT, words.next().unwrap_or(0));
        (event.gpu_instance, event.compute_instance) = (c_uint::MAX, c_uint::MAX);
        SUCCESS
    })
}

/// Returns the next line from the event FIFO. Returns `None` if no line arrives within the time limit.
fn next_line(milliseconds: c_uint) -> Option<String> {
    let mut events = EVENTS.lock().ok()?;
    if events.is_none() {
        // Open the FIFO for reading and writing. Otherwise, a read would return EOF while no writer has it open.
        let mut options = OpenOptions::new();
        let fifo = options.read(true).write(true).custom_flags(libc::O_NONBLOCK).open(path("events")).ok()?;
        *events = Some((fifo, Vec::new()));
    }
    let (fifo, unread) = events.as_mut()?;
    loop {
        if let Some(end) = unread.iter().position(|byte| *byte == b'\n') {
            let line = unread.drain(..=end).collect::<Vec<u8>>();
            return Some(String::from_utf8_lossy(&line).trim().to_owned());
        }
        let limit = PollTimeout::try_from(milliseconds).unwrap_or(PollTimeout::NONE);
        let ready = poll(&mut [PollFd::new(fifo.as_fd(), PollFlags::POLLIN)], limit).ok()?;
        if ready == 0 {
            return None;
        }
        let mut part = [0; 4096];
        let size = fifo.read(&mut part).ok()?;
        unread.extend_from_slice(&part[..size]);
    }
}
