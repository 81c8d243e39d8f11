package admin

import (
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"time"
)

// Listen listens on a TCP address for the endpoint. Unless public, it refuses every
// address that is not loopback, and one without a host: that would be all of them.
func Listen(address string, public bool) (net.Listener, error) {
	a, err := net.ResolveTCPAddr("tcp", address)
	if err != nil {
		return nil, fmt.Errorf("admin: %w", err)
	}
	if !public && !a.IP.IsLoopback() {
		return nil, fmt.Errorf("admin: %s is not loopback, and whoever can connect can end every request", address)
	}
	return net.ListenTCP("tcp", a)
}

// NewServer returns a server for h that bounds what a client can hold.
func NewServer(h http.Handler) *http.Server {
	return &http.Server{
		Handler:           h,
		ReadHeaderTimeout: 5 * time.Second,
		ReadTimeout:       10 * time.Second,
		WriteTimeout:      maxDuration + 10*time.Second,
		IdleTimeout:       time.Minute,
		MaxHeaderBytes:    32 << 10,
	}
}

// known reports whether host, as a client named it, may be meant.
func known(host string, names []string) bool {
	if h, _, err := net.SplitHostPort(host); err == nil {
		host = h
	}
	if _, err := netip.ParseAddr(strings.Trim(host, "[]")); err == nil {
		return true
	}
	return strings.EqualFold(host, "localhost") || slices.ContainsFunc(names, func(n string) bool { return strings.EqualFold(host, n) })
}

// parse reads the parameters, or answers why it can't. It refuses unknown ones: who
// misspells endpoint must not evict everywhere.
func (x *call) parse(r *http.Request, allowed []string) bool {
	if len(r.URL.RawQuery) > maxForm {
		fail(x.w, http.StatusRequestURITooLong, "the query is too long")
		return false
	}
	r.Body = http.MaxBytesReader(x.w, r.Body, maxForm)
	if err := r.ParseForm(); err != nil {
		if _, ok := errors.AsType[*http.MaxBytesError](err); ok {
			fail(x.w, http.StatusRequestEntityTooLarge, "the body is too long")
		} else {
			fail(x.w, http.StatusBadRequest, "the parameters are no valid form")
		}
		return false
	}
	x.form = make(map[string]string)
	for name, values := range r.Form {
		problem := ""
		switch {
		case !slices.Contains(allowed, name):
			problem = "is unknown; there are " + strings.Join(allowed, ", ")
		case len(values) > 1:
			problem = "is given more than once"
		case len(values[0]) > maxID:
			problem = fmt.Sprintf("is longer than %d bytes: use the form that /requests shows", maxID)
		}
		if problem != "" {
			fail(x.w, http.StatusBadRequest, printable(name)+" "+problem)
			return false
		}
		x.form[name] = values[0]
	}
	return true
}

// number returns a parameter that is a number from low to high, or answers why it is
// none.
func (x *call) number(name string, unset, low, high int) (int, bool) {
	text, given := x.form[name]
	if !given {
		return unset, true
	}
	n, err := strconv.Atoi(text)
	if err != nil || n < low || n > high {
		fail(x.w, http.StatusBadRequest, fmt.Sprintf("%s must be a number from %d to %d", name, low, high))
		return 0, false
	}
	return n, true
}
