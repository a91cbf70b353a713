//! Tests with a truncated, damaged or locked state file, and with a killed writer.

use std::env::{current_exe, var, var_os};
use std::io::{BufRead, BufReader, Write};
use std::process::{Command, Stdio};

use proptest::collection::vec;
use proptest::prelude::*;
use tempfile::TempDir;

use super::*;

const LIMIT: usize = 1 << 30;

fn open(path: &Path) -> Result<(StateFile, Image), StateError> {
    StateFile::open(path, None, [9; 16], LIMIT)
}

fn a_file() -> (TempDir, PathBuf) {
    let folder = TempDir::new().unwrap();
    let path = folder.path().join("state");
    (folder, path)
}

fn put(key: &str, value: Vec<u8>, mod_revision: u64) -> Item {
    let stored = Stored { value: value.into(), create_revision: 1, mod_revision, lease: None };
    Item::Key { key: key.into(), stored: Some(stored) }
}

fn an_item() -> impl Strategy<Value = Item> {
    let granted = any::<(Secret, u32, u16, u32)>().prop_map(|(secret, interval_ms, attempts, ttl_ms)| Granted {
        secret,
        interval_ms,
        attempts,
        ttl_ms,
    });
    let stored = (vec(any::<u8>(), 0..40), any::<u64>(), any::<u64>(), any::<Option<u64>>()).prop_map(
        |(value, create_revision, mod_revision, lease)| Stored {
            value: value.into(),
            create_revision,
            mod_revision,
            lease,
        },
    );
    let key = prop::sample::select(vec!["", "a", "a/1", "é"]);
    prop_oneof![
        1 => (0..4_u64, prop::option::of(granted)).prop_map(|(id, granted)| Item::Session { id, granted }),
        3 => (key, prop::option::of(stored)).prop_map(|(key, stored)| Item::Key { key: key.into(), stored }),
        1 => any::<(u64, u64)>().prop_map(|(revision, next_session)| Item::Counters { revision, next_session }),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    /// Simulates a crash of the process or the machine during a write: the file ends with part of the batch, or with
    /// wrong bytes.
    #[test]
    fn an_interrupted_commit_is_dropped_and_earlier_commits_are_kept(
        batches in vec(vec(an_item(), 0..5), 1..6),
        cut in any::<prop::sample::Index>(),
        flipped in any::<prop::sample::Index>(),
    ) {
        let (_folder, path) = a_file();
        let (mut file, mut image) = open(&path).unwrap();
        let mut states = vec![(file.end, image.clone())];
        for batch in &batches {
            file.commit(batch).unwrap();
            image.apply(batch.clone());
            states.push((file.end, image.clone()));
        }
        drop(file);
        let bytes = std::fs::read(&path).unwrap();
        let read = |bytes: &[u8]| {
            std::fs::write(&path, bytes).unwrap();
            load(&path, &File::open(&path).unwrap(), LIMIT)
        };
        let kept = |image: &Image, dropped: usize| Some((image.clone(), u64::try_from(dropped).unwrap()));
        let flip = |bytes: &[u8], at: usize| {
            let mut flipped = bytes.to_vec();
            flipped[at] ^= 1 << (at % 8);
            flipped
        };
        prop_assert_eq!(read(&bytes).unwrap(), kept(&image, 0));
        // Simulate a crash during the last commit. Loading then restores the previous commit, because the file header
        // still contains the synced length of that commit.
        let (noted, before) = &states[states.len() - 2];
        let synced = usize::try_from(*noted).unwrap();
        let mut on_its_way = bytes.clone();
        on_its_way[12..HEAD_LENGTH].copy_from_slice(&noted.to_le_bytes());
        let at = synced + cut.index(bytes.len() - synced);
        prop_assert_eq!(read(&on_its_way[..at]).unwrap(), kept(before, at - synced));
        prop_assert_eq!(read(&flip(&on_its_way, at)).unwrap(), kept(before, bytes.len() - synced));
        // DISK-1: damage to a completed commit is reported, because the file's header contains the length of all
        // completed commits. An interrupted later commit does not prevent the report.
        let earlier = HEAD_LENGTH + flipped.index(synced - HEAD_LENGTH);
        for damaged in [
            bytes[..at].to_vec(),
            flip(&bytes, at),
            on_its_way[..earlier].to_vec(),
            flip(&on_its_way, earlier),
        ] {
            let is_damaged = matches!(read(&damaged), Err(StateError::Damaged { .. }));
            prop_assert!(is_damaged);
        }
    }

    #[test]
    fn a_replaced_state_file_keeps_the_same_content(batches in vec(vec(an_item(), 0..5), 1..6)) {
        let (_folder, path) = a_file();
        let (mut file, mut image) = open(&path).unwrap();
        for batch in &batches {
            file.commit(batch).unwrap();
            image.apply(batch.clone());
            if batch.len() == 2 {
                file.replace(image.items(&image.entries)).unwrap();
            }
        }
        file.finish().unwrap();
        drop(file);
        image.ids.insert(0, [9; 16]);
        prop_assert_eq!(open(&path).unwrap().1, image);
    }

    #[test]
    fn a_file_of_random_bytes_is_refused_and_not_changed(bytes in vec(any::<u8>(), 1..200)) {
        let (_folder, path) = a_file();
        std::fs::write(&path, &bytes).unwrap();
        let is_foreign = matches!(open(&path), Err(StateError::Foreign(_)));
        prop_assert!(is_foreign);
        prop_assert_eq!(std::fs::read(&path).unwrap(), bytes);
    }
}

#[test]
fn an_empty_file_is_read_as_an_empty_state() {
    let (_folder, path) = a_file();
    std::fs::write(&path, b"").unwrap();
    let (_file, image) = open(&path).unwrap();
    assert_eq!(image, Image { ids: vec![[9; 16]], next_session: 1, ..Image::default() });
}

#[test]
fn ids_of_earlier_stores_are_kept_up_to_a_limit() {
    let (_folder, path) = a_file();
    for id in 0..=u8::try_from(MAX_IDS).unwrap() {
        drop(StateFile::open(&path, None, [id; 16], LIMIT).unwrap());
    }
    let (_file, image) = open(&path).unwrap();
    assert_eq!((image.ids.len(), image.ids[0], image.ids[1], image.ids[63]), (64, [9; 16], [64; 16], [2; 16]));
}

#[test]
fn an_open_state_file_stays_locked_after_it_is_replaced() {
    let (folder, path) = a_file();
    let (mut file, image) = open(&path).unwrap();
    let link = folder.path().join("link");
    std::os::unix::fs::symlink("state", &link).unwrap();
    for _ in 0..2 {
        assert!(matches!(open(&path), Err(StateError::Locked(_))));
        assert!(matches!(open(&link), Err(StateError::Locked(_))));
        file.replace(image.items(&image.entries)).unwrap();
    }
    drop(file);
    drop(open(&link).unwrap());
    assert!(link.is_symlink());
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 2, "nothing else is left in the folder");
    assert_eq!(std::fs::metadata(&path).unwrap().mode() & 0o777, 0o600);
}

#[test]
fn a_state_file_that_another_store_has_created_is_not_replaced() {
    let (_folder, path) = a_file();
    let (mut file, image) = open(&path).unwrap();
    std::fs::remove_file(&path).unwrap();
    let (_other, _) = open(&path).unwrap();
    assert!(matches!(file.replace(image.items(&image.entries)), Err(StateError::Locked(_))));
    drop(file);
    assert!(matches!(open(&path), Err(StateError::Locked(_))));
}

#[test]
fn a_symlink_at_the_temporary_path_is_refused_and_permissions_are_reset() {
    let (folder, path) = a_file();
    let (next, victim) = (folder.path().join(".state.elasticrs-new"), folder.path().join("victim"));
    std::fs::write(&victim, "precious").unwrap();
    std::os::unix::fs::symlink(&victim, &next).unwrap();
    assert!(matches!(open(&path), Err(StateError::Io { .. })));
    assert_eq!(std::fs::read(&victim).unwrap(), b"precious");

    remove_file(&next).unwrap();
    std::fs::write(&next, "").unwrap();
    std::fs::set_permissions(&next, Permissions::from_mode(0o666)).unwrap();
    let _file = open(&path).unwrap();
    assert_eq!(metadata(&path).unwrap().mode() & 0o777, MODE);
}

#[test]
fn replacing_a_removed_state_file_is_an_error() {
    let (_folder, path) = a_file();
    let (mut file, image) = open(&path).unwrap();
    remove_file(&path).unwrap();
    let Err(StateError::Io { source, .. }) = file.replace(image.items(&image.entries)) else { panic!() };
    assert_eq!(source.raw_os_error(), Some(Errno::ENOENT as i32));
}

#[test]
fn an_invalid_state_file_is_reported_and_not_changed() {
    let (folder, path) = a_file();
    let said = |path: &Path, run_id| StateFile::open(path, run_id, [9; 16], LIMIT).unwrap_err().to_string();
    let name = path.display().to_string();
    let folder = folder.path();
    assert_eq!(said(folder, None), format!("cannot open the state {}: Is a directory", folder.display()));
    assert_eq!(said(Path::new("/dev/null"), None), "/dev/null is not the state of a store");
    let nowhere = folder.join("absent/state");
    let absent = format!("cannot write the state {}: No such file or directory", nowhere.display());
    assert_eq!(said(&nowhere, None), absent);

    let (mut file, _) = StateFile::open(&path, Some("a"), [9; 16], LIMIT).unwrap();
    file.commit(&[put("k", vec![0; 1000], 1)]).unwrap();
    file.finish().unwrap();
    drop(file);
    let written = std::fs::read(&path).unwrap();
    assert_eq!(said(&path, Some("b")), format!("the state {name} is of run a, and the store is to serve run b"));
    assert_eq!(said(&path, None), format!("the state {name} is of run a, and the store is to serve any run"));
    let large = StateFile::open(&path, Some("a"), [9; 16], 1000).unwrap_err().to_string();
    assert!(large.contains("takes 1257 bytes") && large.ends_with("at most 1000"), "{large}");
    assert_eq!(std::fs::read(&path).unwrap(), written);

    let mut newer = written.clone();
    newer[8] = 2;
    std::fs::write(&path, &newer).unwrap();
    let newer = format!("a newer version of elasticrs has written the state {name}: in format 2, this one knows 1");
    assert_eq!(said(&path, Some("a")), newer);
    std::fs::write(&path, &written[..written.len() - 1]).unwrap();
    let short = said(&path, Some("a"));
    assert!(short.starts_with(&format!("the state {name} is damaged or was cut off: byte ")), "{short}");
}

#[test]
fn the_state_file_grows_only_to_a_multiple_of_its_content() {
    let (_folder, path) = a_file();
    let (mut file, mut image) = open(&path).unwrap();
    let mut most = 0;
    for revision in 1..40 {
        let item = put("k", vec![0; 1 << 20], revision);
        image.apply([item.clone()]);
        if file.has_grown() {
            file.replace(image.items(&image.entries)).unwrap();
        } else {
            file.commit(&[item]).unwrap();
        }
        most = most.max(std::fs::metadata(&path).unwrap().len());
    }
    assert!(most < 8 << 20, "{most}");
    drop(file);
    assert_eq!(open(&path).unwrap().1.entries, image.entries);
}

#[test]
fn a_state_file_that_cannot_be_replaced_stays_in_use() {
    let (folder, path) = a_file();
    let (mut file, mut image) = open(&path).unwrap();
    let grow = |file: &mut StateFile, image: &mut Image| {
        while !file.has_grown() {
            let item = put("k", vec![0; 1 << 20], image.revision);
            image.apply([item.clone()]);
            file.commit(&[item]).unwrap();
        }
    };
    grow(&mut file, &mut image);
    // A folder at the path of the new file prevents the store from creating that file.
    let obstacle = folder.path().join(".state.elasticrs-new");
    std::fs::create_dir(&obstacle).unwrap();
    assert!(matches!(file.replace(image.items(&image.entries)), Ok(Replaced::No(StateError::Io { .. }))));
    assert!(!file.has_grown(), "it would be tried with each commit");
    file.commit(&[put("later", vec![1], 7)]).unwrap();
    image.apply([put("later", vec![1], 7)]);
    std::fs::remove_dir(&obstacle).unwrap();
    grow(&mut file, &mut image);
    let before = std::fs::metadata(&path).unwrap().len();
    assert!(matches!(file.replace(image.items(&image.entries)), Ok(Replaced::Yes)));
    assert!(std::fs::metadata(&path).unwrap().len() < before / 2);
    drop(file);
    assert_eq!(open(&path).unwrap().1.entries, image.entries);
}

#[test]
fn an_impossible_record_length_does_not_allocate_memory() {
    let peak = || {
        let status = std::fs::read_to_string("/proc/self/status").unwrap();
        let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).unwrap();
        line.split_whitespace().next().unwrap().parse::<u64>().unwrap()
    };
    let (_folder, path) = a_file();
    let (file, _) = StateFile::open(&path, None, [9; 16], 1 << 20).unwrap();
    let end = file.end;
    drop(file);
    let file = OpenOptions::new().write(true).open(&path).unwrap();
    file.write_all_at(&u32::MAX.to_le_bytes(), end).unwrap();
    file.set_len(end + (1 << 33)).unwrap();
    let before = peak();
    let (file, _) = StateFile::open(&path, None, [9; 16], 1 << 20).unwrap();
    assert_eq!(file.dropped, 1 << 33);
    assert!(peak() < before + (256 << 10), "KiB: {before}, {}", peak());
}

#[test]
fn a_file_of_another_user_or_in_a_world_writable_folder_is_refused() {
    let (folder, path) = a_file();
    drop(open(&path).unwrap());
    let allow = |mode| std::fs::set_permissions(folder.path(), Permissions::from_mode(mode)).unwrap();
    allow(0o777);
    assert!(matches!(open(&path), Err(StateError::Unprotected { .. })));
    // With the sticky bit, users may replace only their own files.
    allow(0o1777);
    drop(open(&path).unwrap());
    if !geteuid().is_root() {
        return;
    }
    let other = 4711;
    std::os::unix::fs::chown(&path, Some(other), None).unwrap();
    let written = std::fs::read(&path).unwrap();
    assert!(matches!(open(&path), Err(StateError::Stranger { owner, .. }) if owner == other));
    assert_eq!(std::fs::read(&path).unwrap(), written);
    std::os::unix::fs::chown(&path, Some(0), None).unwrap();
    // Refuse a new file that another user created, because that user may still have it open.
    let next = folder.path().join(".state.elasticrs-new");
    std::fs::write(&next, "").unwrap();
    std::os::unix::fs::chown(&next, Some(other), None).unwrap();
    assert!(matches!(open(&path), Err(StateError::Stranger { path, .. }) if path == next));
    assert_eq!(std::fs::read(&path).unwrap(), written);
}

const KILLED: &str = "ELASTICRS_TEST_STATE";

/// Writes until it is killed and prints the revision of each finished commit. Runs as a child process of the next test.
#[test]
fn writes_until_it_is_killed() {
    let Some(path) = var_os(KILLED) else { return };
    let (mut file, mut image) = open(Path::new(&path)).unwrap();
    let begun = image.revision;
    // The test that started this process kills it long before the loop ends.
    for revision in begun + 1..begun + 100_000 {
        let value = vec![u8::try_from(revision % 251).unwrap(); usize::try_from(revision % 7 * 5000).unwrap()];
        image.revision = revision;
        let items = [image.counters(), put("a", value.clone(), revision), put("b", value, revision)];
        image.apply(items.clone());
        if file.has_grown() {
            file.replace(image.items(&image.entries)).unwrap();
        } else {
            file.commit(&items).unwrap();
        }
        writeln!(std::io::stdout(), "{revision}").unwrap();
    }
}

#[test]
fn a_killed_writer_leaves_all_commits_that_it_reported() {
    assert_eq!(var(KILLED).ok(), None);
    let (_folder, path) = a_file();
    let name = "coordination::durable::tests::writes_until_it_is_killed";
    let mut last = 0;
    for round in 0..20_usize {
        let mut writer = Command::new(current_exe().unwrap())
            .args(["--exact", name, "--nocapture", "--test-threads=1"])
            .env(KILLED, &path)
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let told = BufReader::new(writer.stdout.take().unwrap()).lines().map_while(Result::ok);
        // Skip the lines of the test harness, which do not end in a number.
        let mut told = told.filter_map(|line| line.split_whitespace().last()?.parse::<u64>().ok());
        let told_by_then = told.nth(round * 37 % 40).unwrap();
        writer.kill().unwrap();
        let told_last = told.last().unwrap_or(told_by_then);
        writer.wait().unwrap();
        let (image, _) = load(&path, &File::open(&path).unwrap(), LIMIT).unwrap().unwrap();
        assert!(image.revision >= told_last && image.revision > last, "{} of {told_last}", image.revision);
        assert_eq!(image.entries["a"], image.entries["b"]);
        assert_eq!((image.entries["a"].mod_revision, image.ids.len()), (image.revision, round + 1));
        last = image.revision;
    }
}
